"""Cost of the timeline: step time and processor time with and without it, in turns.

Usage: python bench/timeline.py [-np N] [--workloads W ...] [--pairs K] [--seconds S] [--json FILE]

  many      1000 allreduces of 1 KiB, all synchronised at the end: nothing but events
  resnet    the 161 gradients of ResNet-50, likewise
  training  steps of overlap.py's transformer with DistributedOptimizer

One job per workload. Blocks of S seconds with and without recording take turns in the same processes (off on, on off,
...), so what differs between jobs (memory, placement, the hour) does not count. For each pair the ratio of the
blocks' mean step times is taken: means, for the writer works now and then, and medians of steps would not see it.
Shown are the median of these ratios and their quartiles, beside the same of neighbouring blocks without recording:
the noise of the machine itself. Processor time is that of all ranks. The time of stop_timeline is shown, too: the
writer then writes the remaining events.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import launch
from processes import unwind_on_sigterm

WORKLOADS = ("many", "resnet", "training")
LIMIT_S = 300


def measure(workload: str, ranks: int, pairs: int, seconds: float) -> dict:
    """Every block of one job."""
    found: dict = {"workload": workload, "off": [], "on": []}
    options = ("--workload", workload, "--pairs", str(pairs), "--seconds", str(seconds))
    for record in launch.run("horovod", ranks, "timeline_rank.py", *options, limit_s=LIMIT_S):
        if "variant" in record:
            found[record.pop("variant")].append(record)
        else:
            found |= record
    return found


def spread(values: Sequence[float]) -> str:
    """Median and quartiles as percentages of change."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle - 1:+.1%} ({low - 1:+.1%} to {high - 1:+.1%})"


def ratios(found: dict, key: str) -> list[float]:
    """On over off, pair by pair."""
    return [on[key] / off[key] for off, on in zip(found["off"], found["on"], strict=True)]


def stray(found: dict, key: str) -> list[float]:
    """The same of blocks without recording that were neighbours."""
    off = [block[key] for block in found["off"]]
    return [
        one / other
        for i in range(1, len(off) - 1, 2)
        for one, other in ((off[i], off[i + 1]), (off[i + 1], off[i]))
    ]


def report(found: dict) -> list[str]:
    """Rows for a reader."""

    def compared(key: str) -> str:
        off, on = (
            statistics.median(block[key] for block in found[variant]) * 1e3
            for variant in ("off", "on")
        )
        return f"off {off:.3f} ms, on {on:.3f} ms: {spread(ratios(found, key))}"

    cpu = statistics.median(block["others"] for block in found["off"])
    writer = statistics.median(block["writer"] for block in found["on"])
    stop = statistics.median(block["stop"] for block in found["on"])
    stop_cpu = statistics.median(block["stop_cpu"] for block in found["on"])
    file, steps = found["file"], found["steps"]
    return [
        f"{found['workload']}, {found['ranks']} ranks, {len(found['on'])} pairs of {steps} steps",
        f"  step       {compared('mean')}",
        f"  median step of a block          {spread(ratios(found, 'median'))}",
        f"  processors, all but the writer: {compared('others')}",
        f"  processors, the writer: {writer * 1e3:.3f} ms",
        f"  off beside off: step {spread(stray(found, 'mean'))}, processors {spread(stray(found, 'others'))}",
        f"  the end of a block took {stop * 1e3:.0f} ms, {stop_cpu * 1e3:.0f} ms of processors: "
        f"{stop_cpu / steps / cpu:.1%} of its steps'",
        f"  a file of {file['bytes'] / 1e6:.1f} MB: {file['bytes'] / steps / 1e3:.1f} kB and "
        f"{file['events'] / steps:.0f} events per step; {file['dropped']} dropped",
    ]


def run(
    description: str | None,
    workloads: Sequence[str],
    measure: Callable[[str, int, int, float], dict],
    report: Callable[[dict], list[str]],
) -> None:
    """Measure the workloads that the command line names, and print."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-np", "--num-proc", type=int, default=2)
    parser.add_argument("--workloads", nargs="+", choices=workloads, default=workloads)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=0.4, help="length of a block")
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args()
    unwind_on_sigterm()
    found = []
    for workload in options.workloads:
        found.append(measure(workload, options.num_proc, options.pairs, options.seconds))
        print("\n".join(report(found[-1])), end="\n\n", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    run(__doc__, WORKLOADS, measure, report)
