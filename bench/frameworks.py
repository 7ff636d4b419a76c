"""What a reduction costs in each framework: ours, PyTorch's path, and the framework's own collectives.

Usage: python bench/frameworks.py [-np N] [--rounds K] [--peers P ...] [--json FILE]

Peers take turns in rounds. TensorFlow's own is `MultiWorkerMirroredStrategy`, JAX's own its CPU collectives between
`jax.distributed` processes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from statistics import median

import launch
import tables
from processes import unwind_on_sigterm

# Each with the package that it needs.
PEERS = {
    "torch": "torch",
    "tensorflow": "tensorflow",
    "tensorflow-jit": "tensorflow",
    "mirrored": "tensorflow",
    "jax": "jax",
    "jax-distributed": "jax",
}
OWN = {"tensorflow": "mirrored", "tensorflow-jit": "mirrored", "jax": "jax-distributed"}
LIMIT_S = 300


def measure(ranks: int, rounds: int, budget_s: float, peers: list[str] | None = None) -> dict:
    """Seconds by peer and case."""
    found: dict = {"ranks": ranks, "seconds": {}, "skipped": {}}
    chosen = peers or list(PEERS)
    for peer in chosen:
        if importlib.util.find_spec(PEERS[peer]) is None:
            found["skipped"][peer] = f"{PEERS[peer]} is not installed"
    for _ in range(rounds):
        for peer in chosen:
            if peer in found["skipped"]:
                continue
            words = ("--peer", peer, "--budget", str(budget_s))
            records = launch.run("horovod", ranks, "frameworks_rank.py", *words, limit_s=LIMIT_S)
            for record in records:
                cases = found["seconds"].setdefault(peer, {})
                cases.setdefault(record["case"], []).extend(record["seconds"])
    return found


def rows(found: dict) -> list[str]:
    """Tables: milliseconds of each case, then the ratios that there are goals for."""
    seconds = found["seconds"]
    names = list(dict.fromkeys(name for cases in seconds.values() for name in cases))
    lines = [tables.row("case, ms", *seconds), tables.row(*["---"] * (len(seconds) + 1))]
    for name in names:
        cells = [tables.milliseconds(cases.get(name)) for cases in seconds.values()]
        lines.append(tables.row(name, *cells))
    lines += ["", tables.row("goal", "measured", "at most"), tables.row(*["---"] * 3)]
    lines += [tables.row(*goal) for goal in goals(seconds)]
    return lines + [f"\nNot measured: {who}: {why}." for who, why in found["skipped"].items()]


def goals(seconds: dict) -> list[tuple[str, str, str]]:
    """Each goal with its figure, of medians, and its limit with whether it is reached."""
    found = []

    def goal(name: str, value: float | None, limit: float, unit: str = "") -> None:
        if value is not None:
            mark = tables.REACHED if value <= limit else tables.MISSED
            found.append((name, f"{value:.2f}{unit}", f"{limit:g}{unit} {mark}"))

    def of(peer: str, case: str) -> float | None:
        times = seconds.get(peer, {}).get(case)
        return median(times) if times else None

    def ratio(a: float | None, b: float | None) -> float | None:
        return None if a is None or not b else a / b

    def more(a: float | None, b: float | None) -> float | None:
        return None if a is None or b is None else a - b

    for peer, own in OWN.items():
        extra = more(of(peer, "4 B"), of(peer, "nothing"))
        limit = 20 if peer == "jax" else 25
        goal(
            f"{peer}: 4 B, more than nothing", None if extra is None else extra * 1e6, limit, " us"
        )
        goal(f"{peer}: 64 MiB / PyTorch's", ratio(of(peer, "64 MiB"), of("torch", "64 MiB")), 1.15)
        in_place = of(peer, "64 MiB, in place") or more(
            of(peer, "64 MiB, computed"), of(peer, "computing it")
        )
        theirs = of("torch", "64 MiB, in place")
        goal(f"{peer}: 64 MiB in place / PyTorch's", ratio(in_place, theirs), 1.15)
        gradients = of(peer, "161 gradients")
        goal(
            f"{peer}: 161 gradients / PyTorch's",
            ratio(gradients, of("torch", "161 gradients")),
            1.3,
        )
        goal(
            f"{peer}: 161 gradients / the framework's own",
            ratio(gradients, of(own, "161 gradients")),
            1 / 3,
        )
    tape = more(
        of("tensorflow", "161 gradients, tape"), of("tensorflow", "161 gradients, not reduced")
    )
    goal(
        "tensorflow: a tape's 161 gradients / PyTorch's",
        ratio(tape, of("torch", "161 gradients")),
        1.3,
    )
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-np", "--num-proc", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2, help="runs of each peer")
    parser.add_argument("--budget", type=float, default=1.0, help="seconds for a case")
    parser.add_argument("--peers", nargs="+", choices=list(PEERS))
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args()
    unwind_on_sigterm()
    found = measure(options.num_proc, options.rounds, options.budget, options.peers)
    print("\n".join(rows(found)))
    if options.json:
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
