#!/usr/bin/env bash
# Runs tests under AddressSanitizer (`address`), ThreadSanitizer (`thread`) or Miri (`miri`; `front-end`: that of the crate
# `horovod` alone); the first three without words.
# `--no-run` only builds. See "Sanitizers and Miri" in docs/security.md.
set -euo pipefail
cd "$(dirname "$0")/.."
run=()
[ "${1:-}" = --no-run ] && { run=(--no-run); shift; }
target=$(rustc -vV | sed -n 's/^host: //p')
export PROPTEST_CASES=${PROPTEST_CASES:-8}
# Where there is unsafe code.
crates=(horovod-kernels horovod-transport horovod-collectives horovod-engine)

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

# Ranks of these tests are threads that share one mapping, so ThreadSanitizer sees what they do to each other's memory.
thread() {
  # Locks and reference counts are std's: with a std that is not instrumented each of them looks like a race.
  rustup component add --toolchain nightly rust-src
  sanitized -Zsanitizer=thread thread +nightly test -Zbuild-std
}

# rustix must call libc, whose functions Miri knows, and not the kernel.
prepare_miri() {
  rustup component add --toolchain nightly miri rust-src
  export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/miri" RUSTFLAGS="--cfg rustix_use_libc"
  # Without isolation, because proptest looks for files.
  open=-Zmiri-disable-isolation
}

# The front end on one rank: an engine, its threads, and every way to pass memory to it.
front_end() {
  MIRIFLAGS=$open cargo +nightly miri test --locked --package horovod --lib "${run[@]}" -- one_rank a_future_that_has calls_after
}

# Tests that need no sockets but pairs of them: the state machines, kernels, layouts, rings, and whole collectives of ranks that
# share memory.
miri() {
  prepare_miri
  MIRIFLAGS=$open cargo +nightly miri test --locked --package horovod-protocol --lib "${run[@]}" -- --skip any_
  # Of the kernels' tests those that do not count to billions.
  MIRIFLAGS=$open cargo +nightly miri test --locked --package horovod-kernels --lib --test against_oracle "${run[@]}" -- \
    copy both_destinations averages_of_integers_whose a_nan_on bool_is the_identity scaling_may
  MIRIFLAGS=$open cargo +nightly miri test --locked --package horovod-transport --lib "${run[@]}" -- shm
  front_end
  # With it: Miri's own clock, so that no wait is too long on a slow machine. One test asks for sockets.
  local collectives=(cargo +nightly miri test --locked --package horovod-collectives)
  "${collectives[@]}" --lib "${run[@]}"
  "${collectives[@]}" --test it "${run[@]}" -- small:: prestaged:: --skip what_is_too_long
}

[ $# -gt 0 ] || set -- address thread miri
for what in "$@"; do
  case $what in
    address | thread | miri) "$what" ;;
    front-end) prepare_miri; front_end ;;
    *) echo "address, thread, miri or front-end, not $what"; exit 2 ;;
  esac
done
