"""Counts the instructions of one cached allreduce in the engine, by source file, with valgrind's callgrind.

Usage: python bench/one_call.py [-np RANKS] [--elements N] [--files N]

It also counts the files that the call enters, and names those that more than one other file calls; calls by way of
Rust's library are not seen. With one rank and the elements of FILES_MAX it fails if there are more files, or if
REASONS does not say why a file is called from several. No tier of the tests runs it.

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
import sys
import tempfile
from collections import Counter, defaultdict
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

# The files of the project that a call with so many elements enters on one rank, at most.
FILES_MAX, MEASURED_ELEMENTS = 68, 65536
# Why files are called from more than one other file on one rank.
REASONS = {
    "horovod-collectives/src/slices.rs": "the vector is laid out in reused memory, then read",
    "horovod-engine/src/engine/backend/host.rs": "the driver asks for the route, then starts the run",
    "horovod-engine/src/engine/driver/node.rs": "requests go in, decisions come out, and deadlines are asked for",
    "horovod-engine/src/engine/driver/queue.rs": "the next execution is taken, and its end is noted",
    "horovod-engine/src/engine/handles.rs": "a handle is inserted, completed, and taken by the thread that waits",
    "horovod-engine/src/engine/inspection.rs": "the watch for stalls is asked whether it has anything to do",
    "horovod-engine/src/engine/mod.rs": "the lock of the state that all threads share",
    "horovod-engine/src/engine/recording.rs": "the timeline notes begin and end",
    "horovod-protocol/src/coordinator.rs": "requests go in, decisions come out",
    "horovod-protocol/src/outbox.rs": "what the worker sends is put together and taken",
    "horovod-protocol/src/slots.rs": "a set of numbers, which several tables are made of",
    "horovod-protocol/src/types.rs": "types of the vocabulary",
    "horovod-protocol/src/worker.rs": "a request goes in, actions come out, and entries are counted",
    "horovod-transport/src/platform/region.rs": "accesses to shared memory",
}


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


def entries(lines: Iterable[str]) -> dict[str, set[str]]:
    """For each file of the project, the other project files that call it directly."""
    names: dict[str, str] = {}
    found: defaultdict[str, set[str]] = defaultdict(set)
    file = called = ""
    is_call = False

    def name_of(reference: str) -> str:
        number, _, name = reference.partition(" ")
        return place_of(names.setdefault(number, name))

    for line in lines:
        key, _, value = line.strip().partition("=")
        if key in ("fl", "fi", "fe"):
            file = called = name_of(value)
        elif key in ("cfl", "cfi"):
            called = name_of(value)
        elif key == "calls":
            is_call = True
        elif cost := re.match(r"[+\-*]?\d* (\d+)$", line.strip()):
            # Calls before the measured one cost nothing.
            own = not file.startswith("(") and not called.startswith("(")
            if is_call and own and called != file and int(cost[1]):
                found[called].add(file)
            is_call, called = False, file
    return dict(found)


def place_of(file: str) -> str:
    """A file of the project by its path there; others by the package that they are from."""
    if own := re.search(r"/crates/(horovod[^/]*/.*)", file):
        return own[1]
    if package := re.search(r"/registry/src/[^/]+/([^/]+)/", file):
        return f"({package[1]})"
    return "(Rust's library)" if "/rustc/" in file or "/rust/" in file else "(C library)"


def profile(ranks: int, elements: int) -> tuple[Counter[str], dict[str, set[str]]]:
    """Instructions by place, and the files that enter each file."""
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
        callers: defaultdict[str, set[str]] = defaultdict(set)
        for path in Path(folder).iterdir():
            lines = path.read_text().splitlines()
            for file, count in by_file(lines).items():
                counts[place_of(file)] += count
            for place, others in entries(lines).items():
                callers[place] |= others
        return counts, dict(callers)


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-np", type=int, default=1, help="ranks, threads of one process")
    parser.add_argument("--elements", type=int, default=256, help="elements of float32")
    parser.add_argument("--files", type=int, default=30, help="files that are shown")
    options = parser.parse_args()
    counts, callers = profile(options.np, options.elements)
    # The program that makes the call is none of the files.
    own = {place for place, count in counts.items() if count and "/src/" in place}
    several = {place for place in own if len(callers.get(place, set()) & own) > 1}
    print(f"{counts.total():,} instructions in {len(own)} files of the project, and in libraries")
    for place, count in counts.most_common(options.files):
        others = f"  <- {', '.join(sorted(callers[place] & own))}" if place in several else ""
        print(f"{count:8,}  {place}{others}")
    print(f"{len(several)} files are called from more than one other file")
    if options.np == 1 and options.elements == MEASURED_ELEMENTS:
        unexplained = sorted(several - REASONS.keys())
        if unexplained:
            sys.exit(f"REASONS does not say why several files call {', '.join(unexplained)}")
        if no_longer := sorted(REASONS.keys() - several):
            sys.exit(f"REASONS explains what is not so any more: {', '.join(no_longer)}")
        if len(own) > FILES_MAX:
            sys.exit(f"the call enters {len(own)} files, more than {FILES_MAX}")


if __name__ == "__main__":
    main()
