"""One rank of autotune.py: tunes a workload, then measures the defaults against what was kept, in turns."""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import cases
import torch
from launch import Report

import horovod.torch as hvd

#: One pair is before after, the next after before: a machine that grows slower favours neither.
ORDERS = (("before", "after"), ("after", "before"))
#: Steps after which a job that has not ended tuning gives up.
STEPS_MAX = 20_000
#: Which variable sets what a column of the log says.
SETTINGS = {
    "hierarchical_allreduce": "HOROVOD_HIERARCHICAL_ALLREDUCE",
    "cycle_time_ms": "HOROVOD_CYCLE_TIME",
    "tensor_fusion_threshold": "HOROVOD_FUSION_THRESHOLD",
    "chunk_bytes": "HOROVOD_CHUNK_BYTES",
    "direct_max_bytes": "HOROVOD_DIRECT_MAX_BYTES",
    "exchange_max_bytes": "HOROVOD_EXCHANGE_MAX_BYTES",
    "wire_chunk_bytes": "HOROVOD_WIRE_CHUNK_BYTES",
}


def shapes(workload: str) -> tuple[tuple[int, ...], ...]:
    """Shapes of the float32 gradients, in the order in which backward makes them."""
    if workload == "many":
        return ((256,),) * 1000
    if workload == "resnet50":
        return cases.resnet50_shapes()[::-1]
    width, layers, vocabulary = 512, 6, 16_000
    layer: list[tuple[int, ...]] = [(width, width)] * 4
    layer += [(width, 4 * width), (4 * width, width), *[(width,)] * 8]
    return ((vocabulary, width), (512, width), *(layer * layers))[::-1]


def median_step(step: Callable[[], None], seconds: float) -> float:
    """Of so many seconds of steps, each begun together."""
    for _ in range(5):
        step()
    times: list[float] = []
    # Every rank has to take as many steps: rank 0 says when it is enough.
    while True:
        for _ in range(10):
            hvd.barrier()
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
        if hvd.broadcast_object(sum(times) > seconds, name="enough"):
            return statistics.median(times)


def tune(step: Callable[[], None], log: Path) -> dict:
    """Train until tuning has ended; what it did and kept."""
    hvd.init()
    started, steps, ended = time.perf_counter(), 0, False
    while not ended and steps < STEPS_MAX:
        for _ in range(50):
            step()
        steps += 50
        ended = hvd.broadcast_object(log.read_text().rstrip().endswith("best"), name="ended")
    seconds = time.perf_counter() - started
    rows = hvd.broadcast_object(list(csv.DictReader(log.open())), name="rows")
    hvd.shutdown()
    confirmed = [float(row["score"]) for row in rows if row["phase"] == "confirm"]
    # Two rows per comparison: the settings in force, the challenger.
    gains = [after / before for before, after in zip(confirmed[::2], confirmed[1::2], strict=True)]
    first, last = ({column: row[column] for column in SETTINGS} for row in (rows[0], rows[-1]))
    return {
        "ended": ended,
        "tuning_steps": steps,
        "tuning_s": seconds,
        "gains": gains,
        "defaults": first,
        "kept": last,
    }


def as_settings(row: dict[str, str]) -> dict[str, str]:
    """The variables that set what a row of the log says."""
    settings = {variable: row[column] for column, variable in SETTINGS.items()}
    megabytes = float(row["tensor_fusion_threshold"])
    return settings | {"HOROVOD_FUSION_THRESHOLD": str(int(megabytes * 2**20))}


def main() -> None:
    """Tune, measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--workload", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--pairs", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tensors = [torch.ones(shape) for shape in shapes(options.workload)]

    def step() -> None:
        handles = [
            hvd.allreduce_async_(t, name=f"g.{i}", op=hvd.Average) for i, t in enumerate(tensors)
        ]
        for handle in handles:
            hvd.synchronize(handle)

    # Beside the results, where all ranks find rank 0's.
    log = Path(options.out).with_name("autotune.csv")
    os.environ.update(HOROVOD_AUTOTUNE="1", HOROVOD_AUTOTUNE_LOG=str(log))
    tuned = tune(step, log)
    os.environ["HOROVOD_AUTOTUNE"] = "0"
    lives = {"before": as_settings(tuned["defaults"]), "after": as_settings(tuned["kept"])}

    hvd.init()
    report = Report(options.out, hvd.rank())
    report.add(**tuned, ranks=hvd.size(), bytes=sum(t.nbytes for t in tensors))
    hvd.shutdown()
    for pair in range(options.pairs):
        for when in ORDERS[pair % 2]:
            os.environ.update(lives[when])
            hvd.init()
            report.add(when=when, step=median_step(step, options.seconds))
            hvd.shutdown()
    report.done()


if __name__ == "__main__":
    main()
