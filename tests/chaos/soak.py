"""An elastic job under random faults for a long time, checked against a run in which nothing went wrong: `make soak`.

    python tests/chaos/soak.py [--minutes 30] [--every 5] [--np 4] [--seed N] [--where local|hosts|any] [--only KIND]
        [--torch] [--json FILE]

Every so many seconds something happens to one of the ranks, or to the link between hosts: which fault, to whom and for
how long is drawn from the seed. Every commit of every rank, and the state that each round begins with, must be that of
the undisturbed run after as many steps; no round may begin before the newest commit.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import faults
import ground
import history

import harness

HERE = Path(__file__).resolve().parent
# A job that does not commit for so long hangs.
STALL_MAX_S = 60.0

# Kinds of faults and how often each is drawn.
LOCAL = {
    "SIGKILL": 6,
    "SIGSTOP": 3,
    "connection reset": 2,
    "slow rank": 2,
    "memory refused": 1,
    "no descriptors": 1,
}
BETWEEN_HOSTS = {
    "black hole": 2,
    "one-way partition, out": 1,
    "one-way partition, in": 1,
    "5 % loss": 2,
    "200 ms delay": 1,
}


@dataclass
class Fate:
    """One fault and what came of it."""

    kind: str
    at: float
    undone: float = 0.0
    recovered: float | None = None
    """Seconds to the first commit of the first round that began after it, if one did before the next fault."""
    full: float | None = None
    """Seconds until a round with all ranks had begun."""


class Soak:
    """The job and what has been done to it."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.dice = random.Random(args.seed)
        self.ground = ground.Ground() if args.where == "hosts" else None
        self.fates: list[Fate] = []
        self.struck: dict[int, float] = {}
        """When something was last done to each process."""
        self.entries: list[history.Entry] = []
        self.begun: list[history.Entry] = []
        """Of these, the beginnings of rounds, the oldest first."""
        self._read = 0
        np = args.np
        hosts = f"host-a:{np - np // 2}\nhost-b:{np // 2}\n" if self.ground else f"localhost:{np}\n"
        (folder / "hosts").write_text(hosts)
        cell = {"phase": "everything", "elastic": True, "victim": -1, "inject": ""}
        cell |= {"length": args.length, "pause_s": args.pause, "torch": args.torch}
        (folder / "cell.json").write_text(json.dumps(cell))
        words = [
            str(harness.HOROVODRUN),
            "-np",
            str(np),
            "--min-np",
            "1",
            "--elastic-timeout",
            "120",
        ]
        words += ["--host-discovery-script", f"cat {folder}/hosts"]
        words += [sys.executable, str(HERE / "worker.py"), str(folder)]
        env = {
            # Slots that fail often would rest, and soon no one would be left to do something to.
            "HOROVOD_ELASTIC_SLOT_FAILURES": "1000000",
            "HOROVOD_HEARTBEAT_TIMEOUT_SECONDS": str(args.heartbeat),
            "PYTHONPATH": f"{HERE}:{harness.RANK_SITE}",
        }
        start = self.ground.start if self.ground else harness.Job
        self.job = start(words, limit_s=args.minutes * 60 + 180, env=env)

    def run(self) -> None:
        """Wait until all work, let things happen until the time is over, then let it end."""
        self._until(lambda: len(self._present()) == self.args.np and self._commits() > 10)
        begin = time.monotonic()
        end = begin + self.args.minutes * 60
        due = begin
        while (now := time.monotonic()) < end:
            if now >= due and (pid := self._victim()):
                self._strike(pid)
                due += self.args.every
                if due < time.monotonic():
                    due = time.monotonic()
            if now > due + STALL_MAX_S:
                raise AssertionError(f"nobody to do something to\n{self.tail()}")
            time.sleep(0.05)
            self._poll()
        struck = time.monotonic()
        self._until(lambda: any(e.at > struck and e.committed for e in self.entries[-200:]))
        self._until(lambda: len(self._present()) == self.args.np)
        (self.folder / "stop").touch()
        self.job.succeed()
        if self.ground:
            self.ground.assert_nothing_left()
        self._poll()

    def close(self) -> None:
        self.job.close()
        if self.ground:
            self.ground.close()

    # -- what happens

    def _strike(self, pid: int) -> None:
        kinds = LOCAL | (BETWEEN_HOSTS if self.ground else {})
        if self.args.only:
            kinds = {self.args.only: 1}
        kind = self.dice.choices(list(kinds), list(kinds.values()))[0]
        fault = faults.FAULTS[kind]
        lasts = self.dice.uniform(0.2, 0.8) * self.args.every
        bystanders = [other for other in self._present() if other != pid]
        launcher, wire = self.job.process.pid, self.ground.wire if self.ground else None
        scene = faults.Scene(self.folder, pid, bystanders, launcher, wire)
        fate = Fate(kind, time.monotonic())
        self.struck |= dict.fromkeys([pid, *bystanders] if fault.between_hosts else [pid], fate.at)
        try:
            fault.do(scene)
        except (ProcessLookupError, FileNotFoundError, RuntimeError):
            return  # it has just ended
        undo = fault.undo or (faults.heal_link if fault.between_hosts else None)
        if undo:
            until = fate.at + lasts
            while time.monotonic() < until:
                time.sleep(0.05)
                self._poll()
            undo(scene)
        fate.undone = time.monotonic()
        self.fates.append(fate)

    def _victim(self) -> int | None:
        """A rank of the present round, if another one holds the state and has come into this round unharmed.

        A fault may end its rank only when the next round begins: then nobody may be left with the state.
        """
        present = [pid for pid in self._present() if os.path.exists(f"/proc/{pid}")]
        began = {entry.pid: entry.at for entry in self.begun}
        unharmed = {pid for pid in present if began[pid] > self.struck.get(pid, 0.0)}
        able = [pid for pid in present if unharmed - {pid}]
        return self.dice.choice(sorted(able)) if able else None

    # -- what is known

    def _poll(self) -> None:
        with self.job._changed:
            lines, self._read = self.job._lines[self._read :], len(self.job._lines)
        new = history.parse(line for name, line in lines if name == "out")
        self.entries += new
        self.begun += [entry for entry in new if entry.round]
        # By when it was said, not by when it came: lines of another host may be late.
        self.begun.sort(key=lambda entry: entry.at)
        if self.job.process.poll() is not None and not (self.folder / "stop").exists():
            raise AssertionError(f"the job has ended\n{self.tail()}")
        last = next((e.at for e in reversed(self.entries) if e.committed), time.monotonic())
        if time.monotonic() - last > STALL_MAX_S:
            raise AssertionError(f"no commit for {STALL_MAX_S} s\n{self.tail()}")

    def _until(self, is_so) -> None:
        while not is_so():
            time.sleep(0.05)
            self._poll()
            if time.monotonic() > self.job.deadline:
                raise AssertionError(f"time limit reached\n{self.tail()}")

    def _commits(self) -> int:
        return sum(1 for entry in self.entries[-1000:] if entry.committed)

    def _present(self) -> dict[int, int]:
        """Ranks by process of the newest round that we know of."""
        found: dict[int, int] = {}
        size = None
        for entry in reversed(self.begun):
            if size not in (None, entry.round[0]) or entry.round[1] in found.values():
                break
            size = entry.round[0]
            found[entry.pid] = entry.round[1]
            if len(found) == size:
                break
        return found if len(found) == size else {}

    def tail(self) -> str:
        with self.job._changed:
            lines = [line for _, line in self.job._lines if "committed" not in line]
        return "\n".join(lines[-150:])

    # -- what it amounts to

    def figures(self) -> dict[str, object]:
        entries = sorted(self.entries, key=lambda e: e.at)
        steps: dict[int, float] = {}
        for entry in entries:
            if entry.committed is not None:
                steps.setdefault(entry.committed, entry.at)
        times = sorted(steps.values())
        begun = [(e.at, e.round[0]) for e in entries if e.round and e.round[1] == 0]
        for fate, following in zip(self.fates, [*self.fates[1:], None], strict=True):
            until = following.at if following else float("inf")
            new = next((at for at, _ in begun if fate.at < at < until), None)
            if new is not None:
                first = next((at for at in times if at > new), None)
                fate.recovered = first - fate.at if first else None
                full = [at for at, size in begun if at > fate.at and size == self.args.np]
                fate.full = full[0] - fate.at if full else None
        recoveries = [f.recovered for f in self.fates if f.recovered is not None]
        fulls = [f.full for f in self.fates if f.full is not None]
        return {
            "seconds": round(times[-1] - times[0], 1),
            "ranks": self.args.np,
            "seed": self.args.seed,
            "where": self.args.where,
            "torch": self.args.torch,
            "faults": dict(Counter(fate.kind for fate in self.fates)),
            "faults in all": len(self.fates),
            "steps": max(steps),
            "commits": len(steps),
            "rounds": len(begun),
            "processes": len({entry.pid for entry in entries}),
            "faults that ended a round": len(recoveries),
            "seconds to the next commit (min, median, max)": _spread(recoveries),
            "seconds to full size (min, median, max)": _spread(fulls),
            "by kind": {
                kind: _spread([f.recovered for f in self.fates if f.kind == kind and f.recovered])
                for kind in sorted({f.kind for f in self.fates})
            },
            "longest without a commit": round(max(b - a for a, b in itertools.pairwise(times)), 2),
            "wrong": history.faults_in(entries),
        }


def _spread(values: list[float]) -> list[float] | None:
    if not values:
        return None
    return [round(value, 2) for value in (min(values), statistics.median(values), max(values))]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--minutes", type=float, default=30)
    made.add_argument("--every", type=float, default=5, help="seconds from one fault to the next")
    # Stops and cuts last for less and for more.
    made.add_argument("--heartbeat", type=int, default=2, help="seconds until a rank is given up")
    made.add_argument("--np", type=int, default=4)
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--where", choices=("local", "hosts", "any"), default="local")
    made.add_argument("--only", choices=sorted({**LOCAL, **BETWEEN_HOSTS}))
    made.add_argument(
        "--pause", type=float, default=0.02, help="seconds that a step takes at least"
    )
    made.add_argument("--length", type=int, default=20_000, help="elements of a step's tensors")
    made.add_argument("--torch", action="store_true", help="with PyTorch's state")
    made.add_argument("--json", type=Path, help="file for the figures")
    return made


def soak(args: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Run it; its figures. AssertionError if the job ends, hangs, or leaves something behind."""
    run = Soak(args, folder)
    try:
        run.run()
        return run.figures()
    finally:
        run.close()


def main() -> int:
    args = parser().parse_args()
    if args.where == "any":
        reason = ground.why_not()
        print(f"on this machine alone: {reason}" if reason else "between two hosts", flush=True)
        args.where = "local" if reason else "hosts"
    with tempfile.TemporaryDirectory(prefix="hvd-soak-") as folder:
        figures = soak(args, Path(folder))
    text = json.dumps(figures, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")
    return 1 if figures["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
