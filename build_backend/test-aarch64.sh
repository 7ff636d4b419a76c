#!/usr/bin/env bash
# Builds and runs the Rust tests of the lower layers for Linux on 64-bit Arm, under qemu's user emulation.
set -euo pipefail
cd "$(dirname "$0")/.."

export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -L /usr/aarch64-linux-gnu"
export CC_aarch64_unknown_linux_gnu=aarch64-linux-gnu-gcc

# Three tests ask what the emulator lacks: memory that forked children do not inherit (madvise is ignored), and, two
# of them, starting their own executable as another process (the kernel cannot run it without the emulator).
skipped=(a_forked_child_does_not_have_the_shared_memory a_killed_process_is_reported_by_those_who_talk_to_it
  dropped_descriptors_are_too_many_open_files)
echo "not run under emulation: ${skipped[*]}"

# Emulation is slow: few threads at a time, one limit for all.
crates=(horovod-protocol horovod-kernels horovod-transport horovod-collectives)
timeout --kill-after=10 "${LIMIT_S:-3000}" cargo test --locked --target aarch64-unknown-linux-gnu --no-fail-fast \
  "${crates[@]/#/--package=}" --lib --tests -- --test-threads=2 "${skipped[@]/#/--skip=}"
