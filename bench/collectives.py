"""Measures the cases of cases.py: every peer under its own launcher, taking turns in rounds, and the floor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import floor
import launch
from cases import Case

PEERS = ("horovod", "gloo", "mpi")
# One peer's pass over all cases; several times what it takes.
LIMIT_S = 600


def measure(
    cases: Sequence[Case], ranks: int, rounds: int, repeats: int, budget_s: float, folder: Path
) -> dict:
    """Seconds of every repeat by case and peer; which peers could not run, and why."""
    seconds: dict[str, dict[str, list[float]]] = {case.name: {} for case in cases}
    skipped = {peer: why for peer in PEERS if (why := launch.missing(peer))}
    if why := floor.missing():
        skipped["floor"] = why
    for peer, why in skipped.items():
        print(f"skipped: {peer}: {why}", flush=True)
    arguments = ["--repeats", str(repeats), "--budget", str(budget_s), "--cases"]
    arguments += [case.name for case in cases]
    barriers = []
    for turn in range(1, rounds + 1):
        if "floor" not in skipped:
            barriers.append(floor.barrier_s(folder))
        for peer in PEERS:
            if peer in skipped:
                continue
            print(f"{ranks} ranks, round {turn} of {rounds}: {peer}", flush=True)
            try:
                records = launch.run(
                    peer, ranks, "collectives_rank.py", "--peer", peer, *arguments, limit_s=LIMIT_S
                )
            except launch.PeerFailed as failure:
                if peer == "horovod":
                    raise
                print(f"skipped from here on: {failure}", flush=True)
                skipped[peer] = str(failure).splitlines()[0]
                continue
            for record in records:
                seconds[record["case"]].setdefault(peer, []).extend(record["seconds"])
        if "floor" not in skipped:
            for case in cases:
                if found := floor.measure(case, ranks, repeats, folder):
                    seconds[case.name].setdefault("floor", []).extend(found)
    return {"ranks": ranks, "seconds": seconds, "skipped": skipped, "meetings": barriers}
