#!/bin/bash
# Fuzzes every target, or those named, for FUZZ_SECONDS each (default 600), one process at lowest priority.
# An input may take FUZZ_INPUT_SECONDS (300): libFuzzer counts real time, and at lowest priority, or while somebody has stopped the
# process, milliseconds of work take long; what never ends is found all the same.
# Begins with the corpus of crates/horovod-fuzz; what is new goes to fuzz/corpus, which git ignores. Afterwards
# `fuzz/run.sh --keep` adds the smallest inputs that reach more code, up to KEEP_BYTES per target, to the corpus.
set -euo pipefail
cd "$(dirname "$0")"
keep=
[ "${1:-}" = --keep ] && { keep=1; shift; }
mapfile -t targets < <(if [ $# -gt 0 ]; then printf '%s\n' "$@"; else ls fuzz_targets | sed 's/\.rs$//'; fi)
for target in "${targets[@]}"; do
    kept=../crates/horovod-fuzz/corpus/$target
    mkdir -p "corpus/$target" "$kept"
    if [ -n "$keep" ]; then
        least=$(mktemp -d)
        # libFuzzer takes from the later folders, smallest first, what adds coverage.
        cargo +nightly fuzz run -s none "$target" -- -merge=1 -rss_limit_mb=1024 "$least" "$kept" "corpus/$target"
        budget=${KEEP_BYTES:-6000}
        rm -f "$kept"/[0-9a-f]*
        while read -r size file; do
            budget=$((budget - size - 1))
            [ $budget -ge 0 ] || break
            cp "$file" "$kept/$(basename "$file" | cut -c 1-16)"
        done < <(find "$least" -type f -printf '%s %p\n' | sort -n)
        rm -r "$least"
    else
        echo "== $target"
        nice -n 19 cargo +nightly fuzz run -s none "$target" "corpus/$target" "$kept" -- \
            -max_total_time="${FUZZ_SECONDS:-600}" -max_len=1000 -timeout="${FUZZ_INPUT_SECONDS:-300}" -rss_limit_mb=1024 -use_value_profile=1 \
            -print_final_stats=1 -verbosity="${FUZZ_VERBOSITY:-1}"
    fi
done
