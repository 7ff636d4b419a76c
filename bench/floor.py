"""Compiles floor.c and runs it for the cases that have a floor."""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path

from cases import Case
from processes import output_of

SOURCE = Path(__file__).with_name("floor.c")
LIMIT_S = 60
#: As in floor.c.
BARRIERS = 1000
BARRIER_REPEATS = 20


def missing() -> str | None:
    """Why it cannot run here, or None."""
    return None if shutil.which("gcc") else "gcc is not installed"


@functools.cache
def program(folder: Path) -> Path:
    """The compiled program, for this very processor."""
    out = folder / "floor"
    folder.mkdir(parents=True, exist_ok=True)
    flags = ["-O3", "-march=native", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(["gcc", *flags, "-o", str(out), str(SOURCE)], check=True, timeout=LIMIT_S)
    return out


def measure(case: Case, ranks: int, repeats: int, folder: Path) -> list[float]:
    """Seconds of each repeat; nothing for a case without a floor."""
    if case.floor is None:
        return []
    return _run(folder, *case.floor, ranks, repeats * case.repeats)


def barrier_s(folder: Path) -> float:
    """Seconds in which two processes meet through one line of memory, at best.

    The host of a virtual machine may put its processors under one cache or under two, and move them.
    """
    return min(_run(folder, "meet", "-", 8, 2, BARRIER_REPEATS)) / BARRIERS


def _run(folder: Path, what: str, dtype: str, nbytes: int, ranks: int, repeats: int) -> list[float]:
    words = [program(folder), what, dtype, str(ranks), str(nbytes), str(repeats)]
    done = output_of(words, LIMIT_S)
    done.check_returncode()
    return [float(line) for line in done.stdout.split()]
