"""Cost of measuring a job (docs/watching.md): step time and processor time with and without it, in turns.

Usage: python bench/metrics.py [-np N] [--workloads W ...] [--pairs K] [--seconds S] [--json FILE]

  small     100 allreduces of 1 KiB, each synchronised: nothing but operations
  many      1000 allreduces of 1 KiB, all synchronised at the end
  resnet    the 161 gradients of ResNet-50, likewise
  training  steps of overlap.py's transformer with DistributedOptimizer

One job per workload. Blocks of S seconds with and without measuring take turns in the same processes, which leave the
job and begin it again in between. For each pair the ratio of the blocks' figures is taken. Shown are the median of
these ratios and their quartiles, beside the same of neighbouring blocks without measuring: the noise of the machine
itself. Processor time is that of all ranks and threads.

`make bench` also measures rank 0 of 64 idle ranks: the share of a processor that it uses, with and without measuring
in turns. All ranks report to it once a second.
"""

from __future__ import annotations

import statistics

import launch
import timeline

WORKLOADS = ("small", "many", "resnet", "training")
LIMIT_S = 300


def measure(workload: str, ranks: int, pairs: int, seconds: float) -> dict:
    """Every block of one job."""
    found: dict = {"workload": workload, "off": [], "on": []}
    options = ("--workload", workload, "--pairs", str(pairs), "--seconds", str(seconds))
    for record in launch.run("horovod", ranks, "metrics_rank.py", *options, limit_s=LIMIT_S):
        if "variant" in record:
            found[record.pop("variant")].append(record)
        else:
            found |= record
    return found


def report(found: dict) -> list[str]:
    """Rows for a reader."""
    rows = [
        f"{found['workload']}, {found['ranks']} ranks, {len(found['on'])} pairs of {found['steps']} steps"
    ]
    for key, name in (("mean", "step"), ("median", "median step"), ("others", "processors")):
        on = timeline.spread(timeline.ratios(found, key))
        off = timeline.spread(timeline.stray(found, key))
        rows.append(f"  {name}: on beside off {on}, off beside off {off}")
    return rows


def measure_rank_0(ranks: int, pairs: int, seconds: float) -> dict:
    """The shares of a processor that rank 0 of many idle ranks uses."""
    found: dict = {"off": [], "on": []}
    options = ("--pairs", str(pairs), "--seconds", str(seconds))
    for record in launch.run("horovod", ranks, "metrics_idle_rank.py", *options, limit_s=LIMIT_S):
        if "variant" in record:
            found[record["variant"]].append(record["share"])
        else:
            found |= record
    return found


def sections(found: dict) -> list[str]:
    """A table for the report."""
    lines = ["| workload | step, on beside off | off beside off | processors, on beside off |"]
    lines.append("| --- | --- | --- | --- |")
    for its in found["workloads"]:
        on, off = timeline.ratios(its, "mean"), timeline.stray(its, "mean")
        cells = [timeline.spread(values) for values in (on, off, timeline.ratios(its, "others"))]
        lines.append(f"| {its['workload']}, {its['ranks']} ranks | {' | '.join(cells)} |")
    rank_0 = found["rank_0"]
    on, off = (statistics.median(rank_0[variant]) for variant in ("on", "off"))
    lines += [
        "",
        f"Rank 0 of {rank_0['ranks']} idle ranks uses {on:.2%} of a processor, without measuring {off:.2%}.",
    ]
    return lines


if __name__ == "__main__":
    timeline.run(__doc__, WORKLOADS, measure, report)
