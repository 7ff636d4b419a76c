"""pip and the distributions: upgrades from the original, both orders, a requirements file, uninstalling either.

The wheel `horovod` here holds the files that this interpreter has installed, so that imports and `horovodrun` are the
real ones. The original is a stand-in that owns the same paths as the original's wheel.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import cloudpickle
import pytest

import harness
import horovod
import metadata_wheel

VERSION = metadata_wheel.version_of_workspace()
ORIGINAL = "0.28.1"
# An import of each kind: the package, the compiled module, what other packages import, what needs a dependency.
IMPORTS = (
    "import horovod, horovod._core, horovod.common.util, horovod.runner, horovod.runner.launch"
)


def package_files(module: str, folder: Path) -> dict[str, str | bytes]:
    """Every file of an installed package, by its path in a wheel."""
    return {
        f"{module}/{file.relative_to(folder).as_posix()}": file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and "__pycache__" not in file.parts
    }


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of wheels: those that are published, the original's, what they need, a package that requires Horovod."""
    place = tmp_path_factory.mktemp("dist")
    project = metadata_wheel.read_project()
    metadata_wheel.build(place)
    headers = [("Requires-Dist", need) for need in project["dependencies"]]
    for extra, needs in project["optional-dependencies"].items():
        headers.append(("Provides-Extra", extra))
        headers += [("Requires-Dist", f'{need} ; extra == "{extra}"') for need in needs]
    files = package_files("horovod", Path(horovod.__file__).parent)
    folder = f"{project['name'].replace('-', '_')}-{VERSION}.data/scripts"
    files[f"{folder}/horovodrun"] = harness.HOROVODRUN.read_bytes()
    metadata_wheel.write_wheel(place, project["name"], VERSION, headers, files)
    metadata_wheel.write_wheel(
        place,
        "cloudpickle",
        cloudpickle.__version__,
        files=package_files("cloudpickle", Path(cloudpickle.__file__).parent),
    )
    metadata_wheel.write_wheel(place, "torch", "2.9")
    client = [("Requires-Dist", "horovod[pytorch]>=0.27")]
    metadata_wheel.write_wheel(place, "client", "1.0", client)
    return place


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stand-in for the original's wheel, with the paths that ours has, some of its own, and a program."""
    version = f"__version__ = {ORIGINAL!r}\n"
    files: dict[str, str | bytes] = {
        "horovod/__init__.py": version,
        "horovod/common/__init__.py": version,
        "horovod/common/util.py": version,
        "horovod/metadata.json": "{}",
        "horovod/runner/__init__.py": version,
        "horovod/runner/js_run.py": version,
        "horovod/runner/launch.py": "def run_commandline():\n    print('the original')\n",
        "horovod/torch/__init__.py": version,
        "horovod/torch/mpi_lib_v2.cpython-311-x86_64-linux-gnu.so": b"\x7fELF",
        f"horovod-{ORIGINAL}.dist-info/entry_points.txt": (
            "[console_scripts]\nhorovodrun = horovod.runner.launch:run_commandline\n"
        ),
    }
    place = tmp_path_factory.mktemp("original")
    extras = [("Provides-Extra", "pytorch")]
    return metadata_wheel.write_wheel(place, "horovod", ORIGINAL, extras, files)


class Environment:
    """A fresh environment without a network."""

    def __init__(self, home: Path, shelf: Path) -> None:
        self.home = home
        self.shelf = shelf
        venv.create(home)
        self.site = next((home / "lib").glob("python*/site-packages"))

    def pip(self, *words: str | Path) -> None:
        """Run pip; it has to succeed."""
        done = self.run_pip(*words)
        assert done.returncode == 0, done.stdout + done.stderr

    def install(self, *words: str | Path) -> None:
        # Python compiles what it imports; pip removes that as well.
        shelf = f"--find-links={self.shelf}"
        self.pip("install", "--no-index", "--no-compile", shelf, *words)

    def run_pip(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--isolated"]
        return run(*command, "--python", str(self.home / "bin" / "python"), *map(str, words))

    def versions(self) -> dict[str, str]:
        """The installed distributions."""
        folders = [
            folder.name.removesuffix(".dist-info") for folder in self.site.glob("*.dist-info")
        ]
        return {
            name.replace("_", "-"): version for name, version in (x.split("-") for x in folders)
        }

    def check_ours(self) -> None:
        """This package is whole: its program, its imports, its record, nothing of the original's."""
        printed = run(str(self.home / "bin" / "horovodrun"), "--version")
        assert printed.stdout.strip() == VERSION, printed.stdout + printed.stderr
        code = f"{IMPORTS}; from horovod import _installation as i; "
        code += "print(horovod.__version__, horovod.__file__, i.findings())"
        printed = run(str(self.home / "bin" / "python"), "-W", "error", "-c", code)
        assert printed.stdout.split() == [VERSION, f"{self.site}/horovod/__init__.py", "[]"], (
            printed.stdout + printed.stderr
        )
        checked = self.run_pip("check")
        assert checked.returncode == 0, checked.stdout

    def check_original(self) -> None:
        """The original is whole, and nothing of ours is left."""
        printed = run(str(self.home / "bin" / "horovodrun"))
        assert printed.stdout.strip() == "the original", printed.stderr
        assert not list((self.site / "horovod").glob("_core*"))
        assert (self.site / "horovod" / "runner" / "js_run.py").is_file()

    def check_none(self) -> None:
        """Neither is there."""
        assert not (self.site / "horovod").exists()
        assert not (self.home / "bin" / "horovodrun").exists()


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=harness.LIMIT_S, check=False, cwd="/"
    )


@pytest.fixture
def fresh(tmp_path: Path, shelf: Path) -> Environment:
    return Environment(tmp_path / "venv", shelf)


def published(shelf: Path) -> list[Path]:
    """The wheels that `pip install dist/*.whl` names."""
    return sorted(shelf.glob("horovod*.whl"))


@pytest.mark.parametrize("options", [(), ("--upgrade",), ("--force-reinstall", "--no-deps")])
def test_the_wheels_replace_the_original(
    fresh: Environment, shelf: Path, original: Path, options: tuple[str, ...]
) -> None:
    fresh.install(original, "cloudpickle")
    fresh.check_original()
    fresh.install(*options, *published(shelf))
    fresh.check_ours()
    assert fresh.versions()["horovod"] == fresh.versions()["horovod-rs"] == VERSION


@pytest.mark.parametrize("name", ["horovod", "horovod-rs"])
def test_either_name_replaces_the_original(fresh: Environment, original: Path, name: str) -> None:
    fresh.install(original)
    fresh.install("--upgrade", name)
    fresh.check_ours()


def test_a_requirements_file_that_names_horovod_is_satisfied(
    fresh: Environment, tmp_path: Path, shelf: Path, original: Path
) -> None:
    needs = tmp_path / "requirements.txt"
    needs.write_text("horovod>=0.27\nclient\n")
    # The original would do, too: pip leaves what is installed, and replaces what has to be newer.
    fresh.install(original)
    fresh.install("-r", needs)
    fresh.check_original()
    fresh.install("--upgrade", "-r", needs)
    fresh.check_ours()
    # And after ours nothing changes.
    fresh.install("-r", needs)
    fresh.check_ours()
    assert {"client", "torch", "horovod"} <= fresh.versions().keys()


def test_the_original_replaces_ours_and_back(
    fresh: Environment, shelf: Path, original: Path
) -> None:
    fresh.install(*published(shelf))
    fresh.check_ours()
    fresh.install("--no-deps", original)
    fresh.check_original()
    # horovod-rs is still there, and pip knows what is wrong with that.
    assert "horovod-rs" in fresh.run_pip("check").stdout
    fresh.install("horovod-rs")
    fresh.check_ours()


def test_either_distribution_can_be_uninstalled(fresh: Environment, shelf: Path) -> None:
    fresh.install(*published(shelf), "client")
    fresh.check_ours()
    fresh.pip("uninstall", "--yes", "horovod-rs")
    fresh.check_ours()
    fresh.install("horovod-rs")
    fresh.pip("uninstall", "--yes", "horovod")
    fresh.check_none()
    assert "horovod-rs" in fresh.versions()
    assert fresh.run_pip("check").returncode == 1
    # horovod-rs requires horovod, so pip installs it again.
    fresh.install("horovod-rs")
    fresh.check_ours()
    fresh.pip("uninstall", "--yes", "horovod", "horovod-rs")
    fresh.check_none()


def test_an_upgrade_of_ours_to_itself_stays_whole(fresh: Environment, shelf: Path) -> None:
    fresh.install(*published(shelf))
    for options in (("--upgrade",), ("--force-reinstall",), ("--force-reinstall", "--no-deps")):
        fresh.install(*options, *published(shelf))
        fresh.check_ours()
