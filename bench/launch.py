"""Starts one program as several ranks under a peer's own launcher, and brings back what rank 0 measured.

Rank 0 writes JSON lines to the file it is given; the last one says that it is done. So results survive a peer that
crashes while it exits, and a run that broke off in the middle is never taken for a whole one.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from processes import started

HERE = Path(__file__).resolve().parent
DONE = "done"
# Share of one processor that others may use before a run is called disturbed.
DISTURBED = 0.1
# Disturbances of this process's runs, for reports.
disturbances: list[str] = []
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


class PeerFailed(Exception):
    """A peer's run ended without all its results."""


class Report:
    """Rank 0's end of the results file; other ranks' reports go nowhere."""

    def __init__(self, path: str, rank: int) -> None:
        self._file: IO[str] | None = open(path, "a") if rank == 0 else None  # noqa: SIM115

    def add(self, **record: Any) -> None:
        """One line, at once on its way to the file."""
        if self._file:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()

    def done(self) -> None:
        """Everything was measured."""
        self.add(**{DONE: True})


@functools.cache
def missing(peer: str) -> str | None:
    """Why a peer cannot run here, or None."""
    if peer == "horovod":
        return None
    if peer == "mpi":
        if not shutil.which("mpirun"):
            return "mpirun is not installed (Debian: openmpi-bin)"
        if not importlib.util.find_spec("mpi4py"):
            return "mpi4py is not installed (pip install mpi4py)"
        tried = subprocess.run(
            [sys.executable, "-c", "from mpi4py import MPI"],
            capture_output=True,
            text=True,
            check=False,
        )
        if tried.returncode:
            return "mpi4py finds no MPI library (Debian: libopenmpi-dev or libopenmpi3)"
        return None
    import torch.distributed

    return None if torch.distributed.is_gloo_available() else "PyTorch was built without Gloo"


def command(
    peer: str, ranks: int, python: str | None = sys.executable, launcher: Path | None = None
) -> list[str]:
    """The peer's launcher, up to the program; ours may be another one, its ranks run another interpreter or none."""
    if peer == "horovod":
        ours = launcher or Path(sys.executable).with_name("horovodrun")
        return [str(ours), "-np", str(ranks), *([python] if python else [])]
    if peer == "mpi":
        allowed = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        return ["mpirun", *allowed, "--oversubscribe", "-np", str(ranks), sys.executable]
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]


def run(
    peer: str,
    ranks: int,
    program: str,
    *arguments: str,
    limit_s: float,
    python: str | None = sys.executable,
    launcher: Path | None = None,
    env: dict[str, str] | None = None,
) -> list[dict]:
    """Run a program of this folder, or one at another place, as ranks of a peer; the records of its rank 0."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        out = Path(folder) / "results"
        words = [
            *command(peer, ranks, python, launcher),
            str(HERE / program),
            "--out",
            str(out),
            *arguments,
        ]
        variables = {**os.environ, **ENVIRONMENT, **(env or {})}
        log = Path(folder) / "log"
        with (
            undisturbed(f"{peer} on {ranks} ranks"),
            log.open("wb") as both,
            started(words, stdout=both, stderr=both, env=variables) as process,
        ):
            try:
                code: int | str = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = f"none within {limit_s:.0f} s"
        return _records(out, f"{peer} on {ranks} ranks", code, log)


@contextlib.contextmanager
def undisturbed(who: str) -> Iterator[None]:
    """Say so when something else used the processors meanwhile: such figures are worth little."""

    def spent() -> tuple[float, float, float]:
        with open("/proc/stat") as stat:
            user, nice, system, _, _, irq, softirq, steal, *_ = map(
                int, stat.readline().split()[1:]
            )
        all_processes = (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
        own = sum(os.times()[:4])
        return time.monotonic(), all_processes - own, steal / os.sysconf("SC_CLK_TCK")

    before = spent()
    yield
    wall, others, stolen = (b - a for a, b in zip(before, spent(), strict=True))
    for what, seconds in (("other processes used", others), ("the hypervisor took", stolen)):
        if seconds > DISTURBED * wall:
            text = f"{what} {seconds / wall:.0%} of a processor during {who}"
            disturbances.append(text)
            print(f"disturbed: {text}", flush=True)


def _records(out: Path, who: str, code: int | str, log: Path) -> list[dict]:
    """The records of a finished run; a crash after the last of them is only mentioned."""
    records = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    if not records or not records[-1].get(DONE):
        text = log.read_text(errors="replace")[-4000:]
        raise PeerFailed(f"{who} ended before all was measured; exit code {code}:\n{text}")
    if code != 0:
        print(f"note: {who} had measured everything, then ended with exit code {code}")
    return records[:-1]
