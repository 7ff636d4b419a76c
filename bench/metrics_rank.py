"""One rank of metrics.py: repeats a workload in blocks with and without measuring and reports what each block took."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import timeline_rank
import torch
from launch import Report

import horovod.torch as hvd


def small_step() -> Callable[[], None]:
    """Small tensors, one after the other."""
    tensor = torch.ones(256)

    def step() -> None:
        for i in range(100):
            hvd.allreduce_(tensor, name=f"g.{i}", op=hvd.Average)

    return step


STEPS = timeline_rank.STEPS | {"small": small_step}


def enter(variant: str) -> None:
    """Begin the job again, with or without measuring."""
    hvd.shutdown()
    os.environ["HOROVOD_METRICS"] = "1" if variant == "on" else "0"
    hvd.init()


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--workload", choices=sorted(STEPS), required=True)
    parser.add_argument("--pairs", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    options = parser.parse_args()

    torch.set_num_threads(1)
    hvd.init()
    report = Report(options.out, hvd.rank())
    took = timeline_rank.block(STEPS[options.workload](), 20)["mean"]
    steps = hvd.broadcast_object(max(5, round(options.seconds / took)), name="steps")
    report.add(steps=steps, ranks=hvd.size())
    for pair in range(options.pairs):
        for variant in timeline_rank.ORDERS[pair % 2]:
            enter(variant)
            mine = timeline_rank.block(STEPS[options.workload](), steps)
            everybody = hvd.allgather_object(mine, name="took")
            # Processor time is of all ranks; of the clock rank 0's is as good as any.
            report.add(
                variant=variant,
                mean=mine["mean"],
                median=mine["median"],
                others=sum(rank["others"] for rank in everybody),
            )
    report.done()
    hvd.barrier()
    hvd.shutdown()


if __name__ == "__main__":
    main()
