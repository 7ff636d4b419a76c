"""The files of a release: licences and bill of materials of the crates inside, checksums."""

from __future__ import annotations

import json
import subprocess
import tomllib
from pathlib import Path

import pytest

import harness
import metadata_wheel
import release
import third_party


@pytest.fixture(scope="module")
def crates() -> list[third_party.Crate]:
    return third_party.crates()


def test_the_crates_are_those_of_the_binaries_without_what_builds_and_tests(crates) -> None:
    names = {crate.name for crate in crates}
    # Of the module, the launcher, and both.
    assert {"pyo3", "saphyr", "snow", "rustix"} <= names
    assert not names & {"loom", "proptest", "divan", "criterion"}
    assert not any(name.startswith("horovod") for name in names)


def test_every_crate_has_its_licence_in_the_text(crates) -> None:
    text = third_party.licences()
    for crate in crates:
        assert crate.licence, crate
        assert f"{crate.name} {crate.version} ({crate.licence})" in text
    assert "No licence file in the crate" not in text
    files = tomllib.loads((harness.ROOT / "pyproject.toml").read_text())["project"]["license-files"]
    assert "THIRD-PARTY-LICENSES.txt" in files


def test_the_bill_of_materials_is_the_same_each_time_and_has_the_versions_of_the_lock_file(
    crates,
) -> None:
    version = metadata_wheel.version_of_workspace()
    text = third_party.bill_of_materials(version)
    assert text == third_party.bill_of_materials(version)
    bill = json.loads(text)
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.5")
    locked = tomllib.loads((harness.ROOT / "Cargo.lock").read_text())["package"]
    known = {(package["name"], package["version"]) for package in locked}
    listed = {(component["name"], component["version"]) for component in bill["components"]}
    assert listed == {(crate.name, crate.version) for crate in crates}
    assert listed <= known


def test_checksums_are_those_of_sha256sum(tmp_path: Path) -> None:
    (tmp_path / "b.whl").write_bytes(b"1")
    (tmp_path / "a.txt").write_bytes(b"2")
    release.write_checksums(tmp_path)
    release.write_checksums(tmp_path)
    check = ["sha256sum", "--check", "--strict", release.CHECKSUMS]
    done = subprocess.run(check, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "a.txt: OK\nb.whl: OK\n")


def test_wheels_of_another_version_are_no_release(tmp_path: Path) -> None:
    (tmp_path / "horovod-0.0.1-py3-none-any.whl").touch()
    with pytest.raises(SystemExit, match="expected the two wheels of version"):
        release.gather(tmp_path, tmp_path / "release")
    assert not (tmp_path / "release").exists()
