"""The published crates: their manifests have all that an index wants, and pin the others of their version."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from typing import Any

import pytest

import harness

WORKSPACE = tomllib.loads((harness.ROOT / "Cargo.toml").read_text())["workspace"]
CRATES = {
    path.parent.name: tomllib.loads(path.read_text())
    for path in sorted(harness.ROOT.glob("crates/*/Cargo.toml"))
}
# For programs; the others are parts of these.
FOR_PROGRAMS = ("horovod", "horovod-launch", "horovod-candle", "horovod-burn")
UNPUBLISHED = {
    *("horovod-fuzz", "horovod-gpu-double", "horovod-python", "horovod-sim", "horovod-tensorflow"),
}


def own(manifest: dict, field: str) -> Any:
    """A field of the manifest, also if it is inherited."""
    value = manifest["package"].get(field)
    return WORKSPACE["package"][field] if value == {"workspace": True} else value


@pytest.mark.parametrize("name", [name for name in CRATES if name not in UNPUBLISHED])
def test_a_published_crate_has_metadata_licence_and_page(name) -> None:
    manifest, folder = CRATES[name], harness.ROOT / "crates" / name
    assert own(manifest, "publish") is None
    for field in ("description", "license", "repository", "keywords", "categories", "rust-version"):
        assert own(manifest, field), field
    assert len(own(manifest, "keywords")) <= 5
    assert (folder / "LICENSE").read_text() == (harness.ROOT / "LICENSE").read_text()
    readme = manifest["package"]["readme"]
    page = (
        folder / "README.md" if readme == "README.md" else harness.ROOT / own(manifest, "readme")
    ).read_text()
    is_part = "an internal part of" in page
    assert is_part == (name not in FOR_PROGRAMS)
    front = (folder / "src" / "lib.rs").read_text()
    assert ("\n//! An internal part of horovod-rs: " in front) == is_part


@pytest.mark.parametrize("name", sorted(UNPUBLISHED))
def test_a_crate_that_no_program_needs_is_not_published(name) -> None:
    assert own(CRATES[name], "publish") is False


def test_crates_are_pinned_to_the_version_of_the_workspace() -> None:
    members = {
        name: dependency
        for name, dependency in WORKSPACE["dependencies"].items()
        if isinstance(dependency, dict) and "path" in dependency
    }
    pinned = {name for name, dependency in members.items() if "version" in dependency}
    assert pinned == members.keys() - UNPUBLISHED
    for name in pinned:
        assert members[name]["version"] == f"={WORKSPACE['package']['version']}", name


def test_a_crate_that_needs_a_newer_rust_is_named() -> None:
    program = [sys.executable, str(harness.ROOT / "build_backend" / "newest_rust.py"), "1.89"]

    def run(*wanted: str) -> subprocess.CompletedProcess[str]:
        packages = ",".join(
            f'{{"name": "c{at}", "version": "1.0.0", "rust_version": {rust}}}'
            for at, rust in enumerate(wanted)
        )
        metadata = f'{{"packages": [{packages}]}}'
        return subprocess.run(program, input=metadata, capture_output=True, text=True, check=False)

    assert run('"1.89"', '"1.9.0"', "null").returncode == 0
    done = run('"1.89.0"', '"1.90"')
    assert done.returncode == 1
    assert "promise Rust 1.89, but: c1 1.0.0 needs Rust 1.90\n" in done.stderr
