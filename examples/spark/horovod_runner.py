"""Handwritten digits by `HorovodRunner`, as notebooks use it.

    python horovod_runner.py --np 2     ranks in Spark's slots
    python horovod_runner.py --np -2    processes on the driver, without Spark's help

With the wheel horovod-rs-sparkdl, `from sparkdl import HorovodRunner` is the same class. The digits are those inside
scikit-learn, so nothing is downloaded.
"""

import argparse
import os
import sys
from typing import Any

from pyspark.sql import SparkSession

from horovod.spark import HorovodRunner


def train(epochs: int, lr: float) -> float:
    """The program of every rank; returns the accuracy on rows that were not trained on."""
    import torch
    import torch.nn.functional as F
    from sklearn.datasets import load_digits
    from torch import nn, optim

    import horovod.torch as hvd
    from horovod.spark import log_to_driver

    hvd.init()
    torch.manual_seed(42)
    digits: Any = load_digits()
    images = torch.from_numpy((digits.images - 4.9) / 6.0).float().flatten(1)
    labels = torch.from_numpy(digits.target).long()
    order = torch.randperm(len(labels))
    images, labels = images[order], labels[order]
    test = len(labels) // 5
    # Every rank the same number of rows.
    usable = (len(labels) - test) // hvd.size() * hvd.size()
    mine = slice(test + hvd.rank(), test + usable, hvd.size())

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = hvd.DistributedOptimizer(
        optim.SGD(model.parameters(), lr=lr * hvd.size(), momentum=0.9),
        named_parameters=model.named_parameters(),
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    accuracy = 0.0
    for epoch in range(epochs):
        for batch, target in zip(images[mine].split(32), labels[mine].split(32), strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(batch), target).backward()
            optimizer.step()
        with torch.no_grad():
            accuracy = float((model(images[:test]).argmax(1) == labels[:test]).float().mean())
        if hvd.rank() == 0:
            log_to_driver(f"epoch {epoch + 1}: accuracy {accuracy:.2%} on {hvd.size()} ranks")
    return accuracy


def main() -> None:
    """Train, and print what rank 0 returned."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--np", type=int, default=2, help="ranks; below 0: on the driver")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of one rank")
    args = parser.parse_args()

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName("digits")
    if "SPARK_ENV_LOADED" not in os.environ:
        builder = builder.master(f"local[{abs(args.np)}]")
    spark = builder.getOrCreate()
    accuracy = HorovodRunner(np=args.np).run(train, epochs=args.epochs, lr=args.lr)
    spark.stop()
    print(f"accuracy of rank 0: {accuracy:.2%}")


if __name__ == "__main__":
    main()
