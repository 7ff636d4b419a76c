"""What autotuning finds: throughput before, after, and the ratio, on three workloads.

    python bench/autotune.py                       all workloads on 2 and 4 ranks
    python bench/autotune.py --workload many --np 2

Each job tunes until it ends and then, in the same processes, runs with the defaults and with what was kept in
alternation (A B B A ...). Before and after are medians over these runs, the ratio is the median of the pairs'.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

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
WORKLOADS = ("resnet50", "many", "transformer")


def shapes(workload: str) -> list[tuple[int, ...]]:
    """Shapes of the float32 gradients, in the order in which backward makes them."""
    if workload == "many":
        return [(256,)] * 1000
    if workload == "transformer":
        width, layers, vocabulary = 512, 6, 16_000
        layer: list[tuple[int, ...]] = [(width, width)] * 4
        layer += [(width, 4 * width), (4 * width, width), *[(width,)] * 8]
        return [(vocabulary, width), (512, width), *(layer * layers)][::-1]
    out: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    inner = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            out += [
                (width, inner, 1, 1),
                (width,),
                (width,),
                (width, width, 3, 3),
                (width,),
                (width,),
            ]
            out += [(4 * width, width, 1, 1), (4 * width,), (4 * width,)]
            if block == 0:
                out += [(4 * width, inner, 1, 1), (4 * width,), (4 * width,)]
            inner = 4 * width
    return [*out, (1000, 2048), (1000,)][::-1]


def worker(workload: str, log: Path, seconds: float, pairs: int) -> None:
    """One rank: measure, tune, measure again."""
    import torch

    import horovod.torch as hvd

    torch.set_num_threads(1)
    tensors = [torch.ones(shape) for shape in shapes(workload)]

    def step() -> None:
        handles = [
            hvd.allreduce_async_(t, name=f"g.{i}", op=hvd.Average) for i, t in enumerate(tensors)
        ]
        for handle in handles:
            hvd.synchronize(handle)

    def median_step() -> float:
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

    def life(settings: dict[str, str]) -> float:
        os.environ.update(settings)
        hvd.init()
        result = median_step()
        hvd.shutdown()
        for name in settings:
            del os.environ[name]
        return result

    os.environ["HOROVOD_AUTOTUNE"] = "1"
    os.environ["HOROVOD_AUTOTUNE_LOG"] = str(log)
    hvd.init()
    started, steps = time.perf_counter(), 0
    ended = False
    while not ended and steps < STEPS_MAX:
        for _ in range(50):
            step()
        steps += 50
        ended = hvd.broadcast_object(log.read_text().rstrip().endswith("best"), name="ended")
    tuning = time.perf_counter() - started
    rows = hvd.broadcast_object(list(csv.DictReader(log.open())), name="rows")
    row, comparisons = rows[-1], [r for r in rows if r["phase"] == "confirm"]
    confirmed = [float(r["score"]) for r in comparisons[-2:]]
    rank, size = hvd.rank(), hvd.size()
    hvd.shutdown()
    os.environ["HOROVOD_AUTOTUNE"] = "0"

    before, after = [], []
    for pair in range(pairs):
        if pair % 2 == 0:
            before.append(life({}))
        after.append(life(as_settings(row)))
        if pair % 2 == 1:
            before.append(life({}))
    if rank != 0:
        return
    print(
        json.dumps(
            {
                "workload": workload,
                "np": size,
                "bytes": sum(t.numel() * 4 for t in tensors),
                "ended": ended,
                "tuning_steps": steps,
                "tuning_s": round(tuning, 1),
                "before_ms": round(statistics.median(before) * 1e3, 3),
                "after_ms": round(statistics.median(after) * 1e3, 3),
                "ratio": round(
                    statistics.median(b / a for a, b in zip(after, before, strict=True)), 3
                ),
                "confirmed": round(confirmed[1] / confirmed[0], 3) if confirmed else None,
                "kept": {name: row[name] for name in SETTINGS},
            }
        ),
        flush=True,
    )


def as_settings(row: dict[str, str]) -> dict[str, str]:
    """The variables that set what a row of the log says."""
    settings = {variable: row[column] for column, variable in SETTINGS.items()}
    megabytes = float(row["tensor_fusion_threshold"])
    return settings | {"HOROVOD_FUSION_THRESHOLD": str(int(megabytes * 2**20))}


def main() -> int:
    """Run the jobs."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--workload", choices=WORKLOADS, action="append")
    parser.add_argument("--np", type=int, action="append")
    parser.add_argument("--seconds", type=float, default=0.5, help="per measurement")
    parser.add_argument(
        "--pairs", type=int, default=5, help="runs with the defaults and with what was kept"
    )
    parser.add_argument("--steps-per-sample", type=int, default=10)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.workload[0], arguments.worker, arguments.seconds, arguments.pairs)
        return 0
    status = 0
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": str(arguments.steps_per_sample),
    }
    for np in arguments.np or (2, 4):
        for workload in arguments.workload or WORKLOADS:
            with tempfile.TemporaryDirectory() as folder:
                log = Path(folder, "autotune.csv")
                words = [
                    "horovodrun",
                    "-np",
                    str(np),
                    sys.executable,
                    __file__,
                    "--worker",
                    str(log),
                ]
                words += ["--workload", workload, "--seconds", str(arguments.seconds)]
                words += ["--pairs", str(arguments.pairs)]
                done = subprocess.run(words, env=environment, check=False)
                status = status or done.returncode
    return status


if __name__ == "__main__":
    sys.exit(main())
