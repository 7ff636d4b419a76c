"""The distributions: `horovod`, which has the files, `horovod-rs`, of metadata alone, and one for `sparkdl`."""

from __future__ import annotations

import ast
import email
import os
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import harness
import horovod
import metadata_wheel
import sparkdl_wheel
from horovod import _installation

# Every extra that the original declares, one for JAX, and one for everything.
EXTRAS = {
    *("pytorch", "tensorflow", "tensorflow-cpu", "tensorflow-gpu", "keras", "mxnet", "jax"),
    *("spark", "pytorch-spark", "ray", "all-frameworks", "all-dependencies", "dev", "test"),
}


def pip(home: Path, *words: str) -> str:
    """Run pip for an environment, without any network; what it said."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    command += ["--isolated", "--python", str(home / "bin" / "python"), *words]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=harness.LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_version_goes_on_from_the_originals() -> None:
    version = tuple(int(part) for part in horovod.__version__.split("."))
    assert version > (0, 28, 1)
    assert horovod.__version__ == metadata_wheel.version_of_workspace()
    citation = (harness.ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {horovod.__version__}\n" in citation


def test_the_package_page_has_addresses_and_no_relative_link(tmp_path: Path) -> None:
    """Of `horovod`'s own metadata, as its backend makes it, and of the other distributions."""
    program = "import horovod_build, sys; print(horovod_build.prepare_metadata_for_build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=harness.ROOT,
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(harness.ROOT / "build_backend"),
        },
        capture_output=True,
        text=True,
        timeout=harness.LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.glob("horovod-*.dist-info/METADATA")
    metadata = email.message_from_string(file.read_text())
    cargo = tomllib.loads((harness.ROOT / "Cargo.toml").read_text())["workspace"]["package"]
    repository = cargo["repository"]
    assert f"Repository, {repository}" in metadata.get_all("Project-URL", [])
    assert len(metadata.get_all("Project-URL", [])) == 3

    links = re.findall(r"\]\(([^)]+)\)", metadata.get_payload())
    assert len(links) > 30
    of_repository = re.compile(rf"{re.escape(repository)}/(blob|raw)/main/([^#]+)")
    for link in links:
        assert link.startswith("https://"), link
        found = of_repository.match(link)
        assert found is None or (harness.ROOT / found[2]).exists(), link
        # An index shows the file itself as a picture, not the repository's page about it.
        assert found is None or (found[1] == "raw") == link.endswith(".svg"), link

    for wheel in (metadata_wheel.build(tmp_path), sparkdl_wheel.build(tmp_path)):
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (n for n in archive.namelist() if n.endswith("/METADATA"))
            assert f"Project-URL: Repository, {repository}" in archive.read(name).decode()


def test_horovod_rs_is_metadata_alone_with_the_originals_extras(tmp_path: Path) -> None:
    wheel = metadata_wheel.build(tmp_path)
    version = metadata_wheel.version_of_workspace()
    assert wheel.name == f"horovod_rs-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(f"horovod_rs-{version}.dist-info/METADATA").decode().splitlines()
    assert all(name.startswith(f"horovod_rs-{version}.dist-info/") for name in names), names
    assert f"Requires-Dist: horovod=={version}" in metadata
    for extra in EXTRAS:
        assert f"Provides-Extra: {extra}" in metadata
        assert f'Requires-Dist: horovod[{extra}]=={version} ; extra == "{extra}"' in metadata
    assert set(metadata_wheel.read_project()["optional-dependencies"]) == EXTRAS
    again = metadata_wheel.build(tmp_path / "again")
    assert again.read_bytes() == wheel.read_bytes()


def test_nothing_recommends_what_no_index_has() -> None:
    """Texts that name a command of pip for this package give it the wheels."""
    texts = [Path(name) for name in ("README.md", "Makefile", "pyproject.toml")]
    texts += [
        file
        for end in ("docs/*.md", "examples/**/*.py", "python/**/*.py")
        for file in harness.ROOT.glob(end)
    ]
    texts += harness.ROOT.glob("crates/*/src/**/*.rs")
    assert len(texts) > 100
    wrong = [
        f"{file}: {found[0]}"
        for file in texts
        for found in re.finditer(
            r"pip install [^`\"\n]*horovod[^`\"\n]*", (harness.ROOT / file).read_text()
        )
        if "--find-links" not in found[0] and ".whl" not in found[0]
    ]
    assert not wrong, wrong


def test_no_error_names_a_page_that_is_not_installed() -> None:
    page = re.compile(r"\bdocs/\S+\.md\b")
    wrong = []
    for file in harness.ROOT.glob("python/**/*.py"):
        tree = ast.parse(file.read_text())
        # A statement of a text alone is a docstring.
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        texts = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and id(node) not in docstrings
        ]
        wrong += [f"{file}: {node.value}" for node in texts if page.search(str(node.value))]
    sources = harness.ROOT.glob("crates/*/src/**/*.rs")
    for file in (source for source in sources if source.name != "tests.rs"):
        lines = file.read_text().splitlines()
        code = [line for line in lines if not line.lstrip().startswith("//")]
        wrong += [f"{file}: {line.strip()}" for line in code if page.search(line)]
    assert not wrong, wrong


def test_sparkdl_is_found_where_no_other_is(tmp_path: Path) -> None:
    dist, home = tmp_path / "dist", tmp_path / "venv"
    wheel = sparkdl_wheel.build(dist)
    other = metadata_wheel.write_wheel(
        dist, "sparkdl", "2.2", files={"sparkdl/__init__.py": "OTHER = True\n"}
    )
    venv.create(home)

    def found() -> str:
        code = "import importlib.util as u; s = u.find_spec('sparkdl'); print(s and s.origin)"
        return subprocess.run(
            [home / "bin" / "python", "-c", code],
            capture_output=True,
            text=True,
            timeout=harness.LIMIT_S,
            check=True,
        ).stdout.strip()

    pip(home, "install", "--no-index", "--no-deps", str(wheel))
    assert found().endswith("site-packages/horovod_rs_sparkdl/sparkdl/__init__.py")
    pip(home, "install", "--no-index", str(other))
    assert found().endswith("site-packages/sparkdl/__init__.py")
    pip(home, "uninstall", "--yes", "horovod-rs-sparkdl")
    assert found().endswith("site-packages/sparkdl/__init__.py")
    pip(home, "uninstall", "--yes", "sparkdl")
    assert found() == "None"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A folder with this package's files in it, as `pip install` would have put them there."""
    ours = Path(horovod.__file__).parent
    for file in ours.rglob("*"):
        place = tmp_path / "site" / "horovod" / file.relative_to(ours)
        if file.is_file() and "__pycache__" not in file.parts:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(file)
    return tmp_path / "site"


def imported(site: Path) -> str:
    """The file of `import horovod` with a folder before all others."""
    return outcome(site, [sys.executable, "-c", "import horovod; print(horovod.__file__)"])


def outcome(site: Path, command: list[str | Path]) -> str:
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=harness.LIMIT_S,
        check=True,
    )
    return done.stderr


def test_no_file_of_ours_is_taken_for_one_of_the_original() -> None:
    folder = Path(horovod.__file__).parent
    assert not [name for name in _installation.MARKERS if (folder / name).exists()]


def test_files_of_the_original_are_noticed_at_import(copy: Path) -> None:
    assert imported(copy) == ""
    (copy / "horovod" / "runner" / "js_run.py").touch()
    printed = imported(copy)
    assert f"mixed with those of horovod-rs in {copy}/horovod (runner/js_run.py" in printed
    assert "pip uninstall -y horovod horovod-rs" in printed


def test_check_build_and_doctor_name_a_mixed_installation(copy: Path) -> None:
    # The package under test need not be an installed wheel: its record is not for here.
    home, version = copy / "horovod", metadata_wheel.version_of_workspace()
    check = [harness.HOROVODRUN, "--check-build"]
    doctor = [harness.HOROVODRUN, "--doctor", "-np", "1", sys.executable, "x.py"]
    metadata_wheel.write_wheel(copy, "horovod", "0.28.1")
    for wheel in copy.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(copy)
        wheel.unlink()
    printed = outcome(copy, check)
    assert (
        f"mixed with another: the original Horovod 0.28.1 is installed, too, in {copy}" in printed
    )
    assert f"-m pip install --find-links dist horovod-rs=={version}" in printed
    (home / "torch" / "mpi_lib_v2.cpython-311-x86_64-linux-gnu.so").touch()
    printed = outcome(copy, check)
    assert f"{home} holds files of the original Horovod: torch/mpi_lib_v2" in printed

    info = copy / f"horovod-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: horovod\nVersion: {version}\n")
    size = (home / "__init__.py").stat().st_size
    whole = f"horovod/__init__.py,sha256=x,{size}\nhorovod.dist-info/RECORD,,\n"
    # As `pip install --target` leaves it, which moves programs.
    (info / "RECORD").write_text(whole + "../../bin/horovodrun,sha256=x,5\n")
    assert "replaced or removed" not in outcome(copy, check)
    (info / "RECORD").write_text(whole + f"horovod/torch/__init__.py,sha256=x,{size + 1}\n")
    printed = outcome(copy, check)
    assert f"files of horovod {version} in {copy} were replaced or removed" in printed
    assert "1, such as horovod/torch/__init__.py" in printed
    done = subprocess.run(
        doctor,
        env={**os.environ, "PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
        timeout=harness.LIMIT_S,
        check=False,
    )
    # Its lines are broken where they are full, which depends on the length of paths.
    printed = " ".join((done.stdout + done.stderr).split())
    assert "has a mixed installation: the original Horovod 0.28.1" in printed
