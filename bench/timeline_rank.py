"""One rank of timeline.py: repeats a workload in blocks with and without recording and reports what each block took."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"

import cases
import overlap_rank
import torch
from launch import Report

import horovod.torch as hvd

WARM_UP_STEPS = 5
#: One pair is off on, the next on off: a machine that grows slower favours neither.
ORDERS = (("off", "on"), ("on", "off"))


def gradients_step(shapes: tuple[tuple[int, ...], ...]) -> Callable[[], None]:
    """All tensors asynchronously, then all of them synchronised."""
    tensors = [torch.ones(shape) for shape in shapes]

    def step() -> None:
        handles = [
            hvd.allreduce_async_(t, name=f"g.{i}", op=hvd.Average) for i, t in enumerate(tensors)
        ]
        for handle in handles:
            hvd.synchronize(handle)

    return step


def training_step() -> Callable[[], None]:
    """Forward, backward with overlapped allreduces, update, of the transformer of overlap.py."""
    torch.manual_seed(0)
    training = overlap_rank.transformer()
    optimizer = hvd.DistributedOptimizer(
        training.optimizer, named_parameters=training.model.named_parameters()
    )
    return overlap_rank.plain_step(training._replace(optimizer=optimizer))


STEPS: dict[str, Callable[[], Callable[[], None]]] = {
    "many": lambda: gradients_step(((256,),) * 1000),
    "resnet": lambda: gradients_step(cases.resnet50_shapes()[::-1]),
    "training": training_step,
}


def processor_times() -> tuple[float, float]:
    """Seconds that the timeline's thread and all others of this process have had."""
    writer = others = 0.0
    for thread in Path("/proc/self/task").iterdir():
        name = (thread / "comm").read_text()
        seconds = int((thread / "schedstat").read_text().split()[0]) * 1e-9
        if name.startswith("horovod-timelin"):
            writer += seconds
        else:
            others += seconds
    return writer, others


def block(step: Callable[[], None], steps: int) -> dict[str, float]:
    """Steps that follow each other as in training; what they took of the clock and of the processors."""
    for _ in range(WARM_UP_STEPS):
        step()
    hvd.barrier()
    before, start = processor_times(), time.perf_counter()
    times = []
    last = start
    for _ in range(steps):
        step()
        now = time.perf_counter()
        times.append(now - last)
        last = now
    writer, others = (a - b for a, b in zip(processor_times(), before, strict=True))
    return {
        "mean": (last - start) / steps,
        "median": statistics.median(times),
        "writer": writer / steps,
        "others": others / steps,
    }


def recorded(step: Callable[[], None], steps: int, path: Path) -> dict[str, float]:
    """A block with the timeline on, and what was left for the end."""
    hvd.start_timeline(str(path))
    hvd.barrier()  # rank 0 has begun
    found = block(step, steps)
    hvd.barrier()
    cpu, start = time.process_time(), time.perf_counter()
    hvd.stop_timeline()
    found["stop"] = time.perf_counter() - start
    hvd.barrier()
    found["stop_cpu"] = time.process_time() - cpu
    return found


def contents(path: Path) -> dict[str, int]:
    """Size of the file, events in it, and how many are said to be missing."""
    events = json.loads(path.read_text())
    dropped = sum(e["args"]["count"] for e in events if e.get("name") == "EVENTS_DROPPED")
    return {"bytes": path.stat().st_size, "events": len(events), "dropped": dropped}


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
    step = STEPS[options.workload]()
    took = block(step, 20)["mean"]
    steps = hvd.broadcast_object(max(5, round(options.seconds / took)), name="steps")
    report.add(steps=steps, ranks=hvd.size())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "timeline.json")
        for pair in range(options.pairs):
            for variant in ORDERS[pair % 2]:
                mine = block(step, steps) if variant == "off" else recorded(step, steps, path)
                everybody = hvd.allgather_object(mine, name="took")
                total = {key: sum(rank.get(key, 0.0) for rank in everybody) for key in mine}
                # Processor time is of all ranks; of the clock rank 0's is as good as any.
                report.add(
                    variant=variant,
                    **{key: mine[key] for key in ("mean", "median", "stop") if key in mine},
                    **{key: total[key] for key in ("writer", "others", "stop_cpu") if key in mine},
                )
        if hvd.rank() == 0:
            report.add(file=contents(path))
    report.done()
    hvd.barrier()
    hvd.shutdown()


if __name__ == "__main__":
    main()
