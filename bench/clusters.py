"""Cost of Spark and Ray over `horovod.run`: time to call a function, to bring results, and per training step.

    python bench/clusters.py spark
    python bench/clusters.py ray --rounds 10

Two ranks on this machine, with one thread each, in turns with `horovod.run`; Spark's session and Ray are warm.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import horovod

RANKS = 2
RESULT_BYTES = 100_000_000
STEPS = 150
WARM_STEPS = 30

Run = Callable[[Callable[..., Any]], list[Any]]


def nothing() -> None:
    """The function that costs nothing."""


def large() -> bytes:
    """A result of 100 MB."""
    return bytes(RESULT_BYTES)


def train() -> float:
    """The median time of a data-parallel step in ms: a model of 0.8 million parameters, batches of 64."""
    import torch

    import horovod.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    widths = [256, 512, 512, 512, 256]
    layers = [
        layer
        for narrow, wide in itertools.pairwise(widths)
        for layer in (torch.nn.Linear(narrow, wide), torch.nn.ReLU())
    ]
    model = torch.nn.Sequential(*layers)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
    )
    batch = torch.randn(64, widths[0])
    times = []
    for _ in range(WARM_STEPS + STEPS):
        start = time.perf_counter()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        times.append(time.perf_counter() - start)
    return statistics.median(times[WARM_STEPS:]) * 1000


def seconds(run: Run, function: Callable[..., Any]) -> float:
    """Wall clock of a whole call."""
    start = time.perf_counter()
    results = run(function)
    elapsed = time.perf_counter() - start
    if len(results) != RANKS:
        raise SystemExit(f"{len(results)} results instead of {RANKS}")
    return elapsed


def compare(name: str, run: Run, rounds: int) -> dict[str, Any]:
    """All figures, in turns with `horovod.run`."""

    def plain(function: Callable[..., Any]) -> list[Any]:
        return horovod.run(function, num_proc=RANKS)

    runs = {"horovod.run": plain, name: run}
    for each in runs.values():
        each(nothing)
    empty: dict[str, list[float]] = {which: [] for which in runs}
    steps: dict[str, list[float]] = {which: [] for which in runs}
    for _ in range(rounds):
        for which, each in runs.items():
            empty[which].append(seconds(each, nothing))
    for number in range(rounds):
        order = list(runs.items())
        for which, each in order if number % 2 else reversed(order):
            # The slower rank.
            steps[which].append(max(each(train)))
    results = {which: seconds(each, large) for which, each in runs.items()}
    added = statistics.median(
        ours - theirs for ours, theirs in zip(empty[name], empty["horovod.run"], strict=True)
    )
    ratio = statistics.median(
        ours / theirs for ours, theirs in zip(steps[name], steps["horovod.run"], strict=True)
    )
    return {
        "empty_function_s": {which: statistics.median(times) for which, times in empty.items()},
        "added_s": added,
        "results_of_100_MB_s": results,
        "step_ms": {which: statistics.median(times) for which, times in steps.items()},
        "step_ratio": ratio,
    }


def on_spark(rounds: int) -> dict[str, Any]:
    """With a local session of as many slots."""
    from pyspark.sql import SparkSession

    import horovod.spark

    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master(f"local[{RANKS}]").config("spark.ui.enabled", "false")
    session = builder.config("spark.driver.memory", "1g").getOrCreate()
    try:
        return compare(
            "horovod.spark.run",
            lambda function: horovod.spark.run(function, num_proc=RANKS),
            rounds,
        )
    finally:
        session.stop()


def on_ray(rounds: int) -> dict[str, Any]:
    """With actors that each call starts and ends."""
    import ray

    from horovod.ray import RayExecutor

    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    # Ray starts its workers with niceness 15, which is its price and not Horovod's: give both the same priority.
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init("local", num_cpus=RANKS, include_dashboard=False, log_to_driver=False)

    def run(function: Callable[..., Any]) -> list[Any]:
        executor = RayExecutor(RayExecutor.create_settings(), num_workers=RANKS)
        executor.start()
        try:
            return executor.run(function)
        finally:
            executor.shutdown()

    try:
        return compare("RayExecutor", run, rounds)
    finally:
        ray.shutdown()


def main() -> None:
    """Measure, and print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("engine", choices=["spark", "ray"])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    figures = (on_spark if args.engine == "spark" else on_ray)(args.rounds)
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
