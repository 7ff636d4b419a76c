"""The cost of a job that another program starts: the same ranks under `horovodrun`, `mpirun`, `srun`, and as pods.

Usage (as root, with openssh-server, slurmctld, slurmd, munge, openmpi-bin):
  python bench/starters.py [--rounds N] [--json FILE]

Two ranks: on one host, and one on each of two hosts, which are network namespaces. Starters take turns in rounds. A row
is the median of the rounds' medians, over that of `horovodrun` on the same hosts. Pods are two agents that join a
launcher (`horovod.runner.join`), so they share no memory and are compared with `horovodrun` on two hosts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "hosts"), str(ROOT / "bench")]

import launch  # noqa: E402  (all made importable just above)
import network  # noqa: E402
import slurm  # noqa: E402
from processes import started, unwind_on_sigterm  # noqa: E402

CASES = ("allreduce f32 4 B", "allreduce f32 64 KiB", "allreduce f32 1 MiB", "allreduce f32 64 MiB")
LIMIT_S = 120.0
WITHIN = 1.05
LATER_S = 0.3
MANY_RANKS, MANY_S = 64, 12.0
HOROVODRUN = str(Path(sys.executable).with_name("horovodrun"))

FIRST = """
import json, sys, time
import numpy as np
import horovod.numpy as hvd
begin = time.perf_counter()
hvd.init()
hvd.allreduce(np.ones(1))
if hvd.rank() == 0:
    with open(sys.argv[1], "w") as out:
        json.dump(time.perf_counter() - begin, out)
"""
MEET = "from horovod import _core; _core.init(); _core.barrier(0)"


class Starters:
    """Two hosts with Slurm, and the ways to start ranks on one of them or on both."""

    def __init__(self, stack: ExitStack) -> None:
        self.net = network.Network(2)
        stack.callback(self.net.down)
        self.slurm = slurm.Slurm(self.net)
        stack.callback(self.slurm.down)
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        key = self.folder / "key"
        key.write_text("ab" * 32)
        key.chmod(0o600)
        ssh = ["-p", str(network.SSH_PORT), "-i", str(self.net.folder / "user")]
        both = ["-H", "host-a:1,host-b:1"]
        mpi = ["mpirun.openmpi", "--allow-run-as-root", "-np", "2"]
        by_ssh = ["-mca", "plm_rsh_args", " ".join(ssh)]
        srun = ["srun", "--mpi=pmi2", "-n2"]
        self.one_host = {
            "horovodrun": [HOROVODRUN, "-np", "2"],
            "mpirun": [*mpi, "--oversubscribe"],
            "srun": [*srun, "-N1"],
        }
        self.two_hosts = {
            "horovodrun": [HOROVODRUN, "-np", "2", *both, *ssh],
            "mpirun": [*mpi, *both, *by_ssh],
            "srun": [*srun, "-N2"],
            "pods": [HOROVODRUN, "-np", "2", "--agents-port", "29500"],
        }
        self.environment = {**os.environ, **self.slurm.env, **launch.ENVIRONMENT}
        self.with_key = {**self.environment, "HOROVOD_JOB_KEY_FILE": str(key)}

    def run(self, words: list[str], program: list[str]) -> float:
        """Run a program as ranks from the first host; seconds until its end."""
        is_pods = "--agents-port" in words
        begin = time.perf_counter()
        with ExitStack() as stack:
            if is_pods:
                for index, host in enumerate(self.net.hosts):
                    join = [sys.executable, "-m", "horovod.runner.join", "host-a:29500"]
                    join += ["--slots", "1", "--index", str(index)]
                    stack.enter_context(started(host.enter(join), env=self.with_key))
            command = self.slurm.enter(self.net.hosts[0], [*words, sys.executable, *program])
            done = subprocess.run(
                command,
                env=self.with_key if is_pods else self.environment,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )
        if done.returncode:
            raise SystemExit(
                f"{words}: exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
            )
        return time.perf_counter() - begin

    def collectives(self, words: list[str]) -> dict[str, float]:
        """The median of each case."""
        out = self.folder / "results"
        out.unlink(missing_ok=True)
        program = [str(ROOT / "bench" / "collectives_rank.py"), "--out", str(out)]
        program += ["--peer", "horovod", "--repeats", "300", "--budget", "1", "--cases", *CASES]
        self.run(words, program)
        records = [json.loads(line) for line in out.read_text().splitlines()]
        return {r["case"]: median(r["seconds"]) for r in records if "case" in r}

    def first(self, words: list[str]) -> dict[str, float]:
        """Seconds of `hvd.init()` and the first allreduce."""
        out = self.folder / "first"
        self.run(words, ["-c", FIRST, str(out)])
        return {"init and first allreduce": json.loads(out.read_text())}


def measured(
    ways: dict[str, list[str]], rounds: int, of: Callable[[list[str]], dict[str, float]]
) -> dict[str, dict[str, float]]:
    """Figures by way and row, ways in turns."""
    found: dict[str, dict[str, list[float]]] = {name: {} for name in ways}
    for _ in range(rounds):
        for name, words in ways.items():
            for row, seconds in of(words).items():
                found[name].setdefault(row, []).append(seconds)
    return {
        name: {row: median(all_of) for row, all_of in rows.items()} for name, rows in found.items()
    }


def table(hosts: str, figures: dict[str, dict[str, float]]) -> None:
    """A row for each case: microseconds, and the ratio to horovodrun's."""
    others = [name for name in figures if name != "horovodrun"]
    print(f"\n| {hosts} | horovodrun, us | {' | '.join(others)} |")
    print("| --- " * (len(others) + 2) + "|")
    for row, own in figures["horovodrun"].items():
        cells = []
        for name in others:
            seconds = figures[name][row]
            if row in CASES:
                good, text = seconds <= own * WITHIN, f"{seconds / own:.2f}"
            else:
                good, text = seconds <= own + LATER_S, f"{seconds - own:+.2f} s"
            cells.append(f"{text} {'✓' if good else '✗'}")
        print(f"| {row} | {own * 1e6:.1f} | {' | '.join(cells)} |")


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    unwind_on_sigterm()
    if why := network.why_not() or slurm.why_not():
        raise SystemExit(f"not measured: {why}")
    figures: dict[str, Any] = {}
    with ExitStack() as stack:
        starters = Starters(stack)
        for hosts, ways in (("one host", starters.one_host), ("two hosts", starters.two_hosts)):
            rows = measured(ways, options.rounds, starters.collectives)
            for name, first in measured(ways, options.rounds, starters.first).items():
                rows[name] |= first
            table(hosts, rows)
            figures[hosts] = rows
        many = ["srun", "--mpi=pmi2", "-N2", f"-n{MANY_RANKS}"]
        seconds = starters.run(many, ["-c", MEET])
        mark = "✓" if seconds < MANY_S else "✗"
        print(
            f"\n{MANY_RANKS} ranks by srun on two nodes: {seconds:.1f} s, at most {MANY_S:.0f} {mark}"
        )
        figures["many"] = seconds
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
