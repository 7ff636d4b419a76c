#!/usr/bin/env bash
# Checks the published crates: `publish` packages them in their order and builds each from its package, `msrv` compiles them with
# the oldest Rust that they promise, `semver` compares their interfaces with the last release; all three without words.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-$PWD/target}
# Workspaces of their own.
mapfile -t frameworks < <(grep -lx '\[workspace\]' crates/*/Cargo.toml | cut -d/ -f2)

publish() {
  # No upload: the crates of this workspace stand in for those that the index does not have yet.
  cargo publish --workspace --dry-run --locked --allow-dirty
  # The front end, which is in another workspace, stands in by a patch. That would change their lock files: hence a copy.
  copy=$(mktemp -d)
  trap 'rm -rf "$copy"' EXIT
  git ls-files -z --cached --others --exclude-standard Cargo.toml Cargo.lock LICENSE README.md crates xtask ':!crates/horovod-fuzz/corpus' |
    xargs -0 cp --parents --no-dereference -t "$copy"
  for crate in "${frameworks[@]}"; do
    (cd "$copy/crates/$crate" && CARGO_TARGET_DIR="$target/${crate#horovod-}" cargo publish --dry-run \
      --config "patch.crates-io.horovod.path='$copy/crates/horovod'")
  done
}

# The `rust-version` of a manifest.
oldest_of() {
  sed -n 's/^rust-version = "\([0-9.]*\)".*/\1/p' "$1"
}

# Compiles with an oldest Rust: its version, then cargo's words.
compile_with() {
  local oldest=$1
  shift
  if ! rustup toolchain list | grep -q "^$oldest-" && ! rustup toolchain install "$oldest" --profile minimal --no-self-update; then
    echo "not run: Rust $oldest could not be installed; not compiled with it: $*"
    return
  fi
  CARGO_TARGET_DIR="$target/msrv" cargo "+$oldest" check --locked "$@"
}

msrv() {
  local oldest manifest
  oldest=$(oldest_of Cargo.toml)
  # Without that compiler this is all that can be checked. clippy refuses newer parts of the standard library (`make lint`).
  cargo metadata --locked --format-version 1 | python3 build_backend/newest_rust.py "$oldest"
  compile_with "$oldest" --package horovod --all-features --package horovod-launch
  for crate in "${frameworks[@]}"; do
    manifest="crates/$crate/Cargo.toml"
    compile_with "$(oldest_of "$manifest")" --manifest-path "$manifest" --all-features
  done
}

semver() {
  local release
  if ! release=$(git describe --tags --abbrev=0 --match 'v*' 2>/dev/null); then
    echo "not run: there is no release (a tag v*) to compare the interfaces with"
    return
  fi
  if ! cargo semver-checks --version >/dev/null 2>&1 && ! cargo install --locked cargo-semver-checks; then
    echo "not run: cargo-semver-checks could not be installed; the interfaces were not compared with $release"
    return
  fi
  cargo semver-checks --baseline-rev "$release" --package horovod
  for crate in "${frameworks[@]}"; do
    cargo semver-checks --baseline-rev "$release" --manifest-path "crates/$crate/Cargo.toml"
  done
}

[ $# -gt 0 ] || set -- publish msrv semver
for what in "$@"; do
  case $what in publish | msrv | semver) "$what" ;; *) echo "publish, msrv or semver, not $what"; exit 2 ;; esac
done
