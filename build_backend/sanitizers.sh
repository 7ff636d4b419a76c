#!/usr/bin/env bash
# Runs tests under AddressSanitizer (`address`), ThreadSanitizer (`thread`) or Miri (`miri`); all three without words.
# `--no-run` only builds. See "Sanitizers and Miri" in docs/security.md.
set -euo pipefail
cd "$(dirname "$0")/.."
run=()
[ "${1:-}" = --no-run ] && { run=(--no-run); shift; }
target=$(rustc -vV | sed -n 's/^host: //p')
export PROPTEST_CASES=${PROPTEST_CASES:-8}
# Where there is unsafe code.
crates=(horovod-kernels horovod-transport horovod-collectives horovod)

sanitized() {
  local flags=$1 folder=$2
  shift 2
  RUSTC_BOOTSTRAP=1 RUSTFLAGS="$flags" CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/$folder" \
    timeout --kill-after=10 "${LIMIT_S:-3000}" cargo "$@" --locked --target "$target" --no-fail-fast \
    "${crates[@]/#/--package=}" --lib --tests "${run[@]}"
}

address() {
  # A test asks for more memory than there can be and expects no.
  ASAN_OPTIONS=detect_stack_use_after_return=1:allocator_may_return_null=1 \
    sanitized -Zsanitizer=address address test
}

thread() {
  # Locks and reference counts are std's: with a std that is not instrumented each of them looks like a race.
  rustup component add --toolchain nightly rust-src
  sanitized -Zsanitizer=thread thread +nightly test -Zbuild-std
}

# No system calls, and of the kernels' tests those that do not count to billions.
miri() {
  rustup component add --toolchain nightly miri rust-src
  export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/miri" MIRIFLAGS=-Zmiri-disable-isolation
  cargo +nightly miri test --locked --package horovod-protocol --lib "${run[@]}" -- --skip any_
  cargo +nightly miri test --locked --package horovod-kernels --lib --test against_oracle "${run[@]}" -- \
    copy both_destinations averages_of_integers_whose a_nan_on bool_is the_identity scaling_may
  cargo +nightly miri test --locked --package horovod-collectives --lib "${run[@]}" -- slices
}

[ $# -gt 0 ] || set -- address thread miri
for what in "$@"; do
  case $what in address | thread | miri) "$what" ;; *) echo "address, thread or miri, not $what"; exit 2 ;; esac
done
