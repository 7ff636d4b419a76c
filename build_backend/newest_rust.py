"""Compares the Rust versions that crates need with the promised one: `cargo metadata | newest_rust.py 1.89`."""

from __future__ import annotations

import json
import sys


def version(text: str) -> tuple[int, ...]:
    """Of `1.89` or `1.89.0`."""
    parts = [int(part) for part in text.split("-")[0].split(".")]
    return tuple(parts + [0] * (3 - len(parts)))


def too_new(metadata: dict, oldest: str) -> list[str]:
    """The crates in this lock file that need a newer Rust."""
    found = []
    for package in metadata["packages"]:
        wanted = package["rust_version"]
        if wanted and version(wanted) > version(oldest):
            found.append(f"{package['name']} {package['version']} needs Rust {wanted}")
    return sorted(found)


if __name__ == "__main__":
    oldest = sys.argv[1]
    if found := too_new(json.load(sys.stdin), oldest):
        sys.exit(f"the crates promise Rust {oldest}, but: " + "; ".join(found))
    print(f"no crate in the lock file asks for a Rust newer than {oldest}")
