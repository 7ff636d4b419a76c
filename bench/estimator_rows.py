"""Rows per second into training: `TorchEstimator` against a plain PyTorch loop under Spark's TorchDistributor.

    python bench/estimator_rows.py --rounds 3

Both read the same Parquet files with two ranks on this machine, batches of 256, and train the same small model; the
plain loop reads by pyarrow, each rank its files, and averages gradients by DistributedDataParallel. In turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RANKS = 2
BATCH = 256
WIDTH = 64
EPOCHS = 2


class TimedLoss:
    """A loss that notes when it was called first and last; rank 0's times go into a file."""

    def __init__(self, path: Path, steps: int) -> None:
        self._path = path
        self._steps = steps
        self._count = 0
        self._first = 0.0

    def __call__(self, output: Any, label: Any) -> Any:
        import torch

        self._count += 1
        if self._count == 1:
            self._first = time.perf_counter()
        if (
            self._count == self._steps
            and os.environ.get("RANK", os.environ.get("HOROVOD_RANK")) == "0"
        ):
            elapsed = time.perf_counter() - self._first
            self._path.write_text(str((self._steps - 1) * BATCH * RANKS / elapsed))
        return torch.nn.functional.mse_loss(output, label.reshape(output.shape))


def make_model() -> Any:
    """The model of both."""
    import torch

    torch.manual_seed(0)
    return torch.nn.Linear(WIDTH, 1)


def plain_loop(folder: str, loss: TimedLoss, steps: int) -> None:
    """The program of each process under TorchDistributor."""
    import pyarrow.dataset as ds
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    files = sorted(str(path) for path in Path(folder).glob("*.parquet"))[rank::size]
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def batches() -> Any:
        for _ in range(EPOCHS + 1):
            for batch in ds.dataset(files).to_batches(columns=["x", "y"], batch_size=BATCH):
                if batch.num_rows == BATCH:
                    x = batch["x"].flatten().to_numpy().reshape(BATCH, WIDTH)
                    yield torch.from_numpy(x.copy()), torch.from_numpy(batch["y"].to_numpy().copy())

    for _, (x, y) in zip(range(steps), batches(), strict=False):
        optimizer.zero_grad()
        loss(model(x.float()), y.float()).backward()
        optimizer.step()
    dist.destroy_process_group()


def main() -> None:
    """Measure, and print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=200_000)
    args = parser.parse_args()
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["OMP_NUM_THREADS"] = "1"

    import torch
    from pyspark.ml.torch.distributor import TorchDistributor
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as F

    from horovod.spark.common.store import Store
    from horovod.spark.common.util import prepare_data
    from horovod.spark.torch import TorchEstimator

    builder = SparkSession.builder.master(f"local[{RANKS}]").config("spark.ui.enabled", "false")
    spark = builder.config("spark.driver.memory", "2g").getOrCreate()
    columns = [F.rand(seed=number).cast("float") for number in range(WIDTH)]
    frame = spark.range(args.rows, numPartitions=2 * RANKS).select(
        F.array(*columns).alias("x"), F.rand(seed=99).cast("float").alias("y")
    )
    steps = EPOCHS * (args.rows // (BATCH * RANKS))
    rates: dict[str, list[float]] = {"plain": [], "shuffled": [], "in order": []}
    with tempfile.TemporaryDirectory() as name:
        store = Store.create(name)
        measured = Path(name) / "rate"
        with prepare_data(RANKS, store, frame, ["y"], ["x"]) as index:
            folder = store.get_localized_path(store.get_train_data_path(index))
            for _ in range(args.rounds):
                distributor = TorchDistributor(RANKS, local_mode=False, use_gpu=False)
                distributor.run(plain_loop, folder, TimedLoss(measured, steps), steps)
                rates["plain"].append(float(measured.read_text()))
                for kind in ("shuffled", "in order"):
                    model = make_model()
                    TorchEstimator(
                        num_proc=RANKS,
                        store=store,
                        model=model,
                        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
                        loss=TimedLoss(measured, steps),
                        feature_cols=["x"],
                        label_cols=["y"],
                        batch_size=BATCH,
                        epochs=EPOCHS,
                        shuffle=kind == "shuffled",
                        verbose=0,
                    ).fit_on_parquet(dataset_idx=index)
                    rates[kind].append(float(measured.read_text()))
    spark.stop()
    print(json.dumps({kind: statistics.median(values) for kind, values in rates.items()}))
    print(json.dumps(rates))


if __name__ == "__main__":
    main()
