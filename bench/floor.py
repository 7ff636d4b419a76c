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
    what, dtype, nbytes = case.floor
    words = [program(folder), what, dtype, str(ranks), str(nbytes), str(repeats * case.repeats)]
    done = output_of(words, LIMIT_S)
    done.check_returncode()
    return [float(line) for line in done.stdout.split()]
