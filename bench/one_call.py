"""Counts the instructions of one cached allreduce in the engine, by source file, with valgrind's callgrind.

Usage: python bench/one_call.py [-np RANKS] [--elements N] [--files N]

Instructions do not depend on what else the machine does. On several ranks the count has the polls during the wait for
the other ranks in it, and these differ from run to run. The engine is built as for a release, but without optimisation
at link time, which costs a tenth more instructions and keeps the files apart. Python is not counted.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "target" / "one-call"
# rustix reads the kernel's clock page by itself, where valgrind has none.
BUILD = {
    "CARGO_PROFILE_RELEASE_CODEGEN_UNITS": "16",
    "CARGO_PROFILE_RELEASE_DEBUG": "line-tables-only",
    "CARGO_PROFILE_RELEASE_LTO": "off",
    "CARGO_PROFILE_RELEASE_STRIP": "none",
    "CARGO_TARGET_DIR": str(TARGET),
    "RUSTFLAGS": "--cfg rustix_use_libc",
}
LIMIT_S = 1200


def by_file(lines: Iterable[str]) -> Counter[str]:
    """Instructions of each source file in a profile of callgrind; a call's own costs are those of the called file."""
    names: dict[str, str] = {}
    counts: Counter[str] = Counter()
    file, is_call = "", False

    def name_of(reference: str) -> str:
        number, _, name = reference.partition(" ")
        return names.setdefault(number, name)

    for line in lines:
        key, _, value = line.strip().partition("=")
        if key in ("fl", "fi", "fe"):
            file = name_of(value)
        elif key in ("cfl", "cfi"):
            name_of(value)
        elif key == "calls":
            is_call = True
        elif cost := re.match(r"[+\-*]?\d* (\d+)$", line.strip()):
            # The line after `calls=` is the inclusive cost of that call.
            counts[file] += 0 if is_call else int(cost[1])
            is_call = False
    return counts


def place_of(file: str) -> str:
    """A file of the project by its path there; others by the package that they are from."""
    if own := re.search(r"/crates/(horovod[^/]*/.*)", file):
        return own[1]
    if package := re.search(r"/registry/src/[^/]+/([^/]+)/", file):
        return f"({package[1]})"
    return "(Rust's library)" if "/rustc/" in file or "/rust/" in file else "(C library)"


def profile(ranks: int, elements: int) -> Counter[str]:
    """Instructions by place."""
    if shutil.which("valgrind") is None:
        raise SystemExit("valgrind is not installed: apt-get install valgrind")
    words = ["cargo", "build", "--locked", "--quiet", "--release", "-p", "horovod-engine"]
    env = os.environ | BUILD
    subprocess.run([*words, "--example", "one_call"], cwd=ROOT, env=env, check=True)
    with tempfile.TemporaryDirectory() as folder:
        options = [f"--callgrind-out-file={folder}/profile", "--toggle-collect=measured_call"]
        program = [str(TARGET / "release/examples/one_call"), str(ranks), str(elements)]
        subprocess.run(
            [
                "valgrind",
                "--quiet",
                "--tool=callgrind",
                "--separate-threads=yes",
                *options,
                *program,
            ],
            check=True,
            timeout=LIMIT_S,
        )
        counts: Counter[str] = Counter()
        for path in Path(folder).iterdir():
            for file, count in by_file(path.read_text().splitlines()).items():
                counts[place_of(file)] += count
        return counts


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-np", type=int, default=1, help="ranks, threads of one process")
    parser.add_argument("--elements", type=int, default=256, help="elements of float32")
    parser.add_argument("--files", type=int, default=30, help="files that are shown")
    options = parser.parse_args()
    counts = profile(options.np, options.elements)
    own = sum(1 for place, count in counts.items() if count and not place.startswith("("))
    print(f"{counts.total():,} instructions in {own} files of the project, and in libraries")
    for place, count in counts.most_common(options.files):
        print(f"{count:8,}  {place}")


if __name__ == "__main__":
    main()
