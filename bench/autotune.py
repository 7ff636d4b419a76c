"""Effect of autotuning: step time before, after, and the ratio, on three workloads.

Usage: python bench/autotune.py [-np N ...] [--workloads W ...] [--pairs K] [--seconds S] [--json FILE]

  resnet50     the 161 gradients of ResNet-50
  many         1000 tensors of 1 KiB
  transformer  gradients of a transformer with a large embedding

Each job tunes until the tuner ends. Then the same processes run with the first and with the kept settings in turns
(before after, after before, ...), with an init for each. Shown are the medians over these runs and, of the pairs, the
median ratio and its quartiles; beside it the same of neighbouring runs with equal settings: what the machine itself
strays by. Where the defaults were kept, both are the same settings.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

import launch
from processes import unwind_on_sigterm

WORKLOADS = ("resnet50", "many", "transformer")
LIMIT_S = 300
#: How the settings are called in a row.
SHORT = {
    "hierarchical_allreduce": "hierarchical",
    "cycle_time_ms": "cycle ms",
    "tensor_fusion_threshold": "fusion MiB",
    "chunk_bytes": "chunk",
    "direct_max_bytes": "direct",
    "exchange_max_bytes": "exchange",
    "wire_chunk_bytes": "wire chunk",
}


def measure(workload: str, ranks: int, pairs: int, seconds: float) -> dict:
    """One job: what tuning kept, and the steps before and after."""
    found: dict = {"workload": workload, "before": [], "after": []}
    options = ("--workload", workload, "--pairs", str(pairs), "--seconds", str(seconds))
    for record in launch.run("horovod", ranks, "autotune_rank.py", *options, limit_s=LIMIT_S):
        if "when" in record:
            found[record["when"]].append(record["step"])
        else:
            found |= record
    return found


def spread(values: Sequence[float]) -> str:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def stray(found: dict) -> list[float]:
    """Ratios of neighbouring runs with equal settings, either way."""
    ratios = []
    for when, first in (("after", 0), ("before", 1)):
        runs = found[when]
        for i in range(first, len(runs) - 1, 2):
            ratios += [runs[i] / runs[i + 1], runs[i + 1] / runs[i]]
    return ratios


def kept(found: dict) -> str:
    """The settings that are others than before."""
    changed = [
        f"{SHORT[name]} {value}"
        for name, value in found["kept"].items()
        if value != found["defaults"][name]
    ]
    return ", ".join(changed) or "the defaults"


def report(found: dict) -> str:
    """A row of the table in docs/autotune.md."""
    ratios = [b / a for b, a in zip(found["before"], found["after"], strict=True)]
    before, after = (statistics.median(found[when]) * 1e3 for when in ("before", "after"))
    gains = ", ".join(f"{gain:.3f}" for gain in found["gains"]) or "none"
    tuning = f"{found['tuning_steps']} steps, {found['tuning_s']:.0f} s"
    cells = [
        found["workload"],
        str(found["ranks"]),
        tuning if found["ended"] else f"not ended after {tuning}",
        f"{before:.2f}",
        f"{after:.2f}",
        spread(ratios),
        spread(stray(found)),
        gains,
        kept(found),
    ]
    return f"| {' | '.join(cells)} |"


HEADER = """\
| workload | ranks | tuning | before ms | after ms | before / after | equal settings | gains in comparisons | kept |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-np", "--num-proc", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=0.5, help="per run")
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args()
    unwind_on_sigterm()
    found = []
    print(HEADER, flush=True)
    for ranks in options.num_proc:
        for workload in options.workloads:
            found.append(measure(workload, ranks, options.pairs, options.seconds))
            print(report(found[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
