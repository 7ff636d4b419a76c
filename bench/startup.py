"""How much longer a job takes to start than the same imports without it.

Two processes that import PyTorch, side by side; and two ranks under horovodrun that import it and initialise. Wall
clock of the whole command, in turns.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

import launch
from processes import started

PLAIN = "import torch"
RANK = "import torch, horovod.torch as hvd; hvd.init()"
LIMIT_S = 120


def side_by_side(ranks: int) -> float:
    """Seconds until all of so many independent processes have ended."""
    return _seconds([[sys.executable, "-c", PLAIN]] * ranks)


def job(ranks: int) -> float:
    """Seconds of a whole job."""
    return _seconds([[*launch.command("horovod", ranks), "-c", RANK]])


def _seconds(commands: list[list[str]]) -> float:
    environment = {**os.environ, **launch.ENVIRONMENT}
    start = time.perf_counter()
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(started(words, env=environment, cwd=Path.home()))
            for words in commands
        ]
        codes = [process.wait(LIMIT_S) for process in processes]
        elapsed = time.perf_counter() - start
    if any(codes):
        raise SystemExit(f"a process that was to start ended with codes {codes}")
    return elapsed


def measure(ranks: int, rounds: int) -> dict:
    """Seconds of both, the first pair not counted: it fills the file cache."""
    seconds: dict[str, list[float]] = {"plain": [], "horovodrun": []}
    for turn in range(rounds + 1):
        for what, run in (("plain", side_by_side), ("horovodrun", job)):
            elapsed = run(ranks)
            if turn:
                seconds[what].append(elapsed)
    return {"ranks": ranks, "seconds": seconds}
