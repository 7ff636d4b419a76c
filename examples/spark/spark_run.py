"""Handwritten digits on ranks in Spark tasks, with a training loop of your own.

    python spark_run.py --num-proc 2
    spark-submit --master spark://host:7077 spark_run.py --num-proc 4

`horovod.spark.run` calls `train` on every rank and brings back what each returned. The digits are those inside
scikit-learn, so nothing is downloaded.
"""

import argparse
import os
import sys
from typing import Any

from pyspark.sql import SparkSession

import horovod.spark


def train(epochs: int, batch_size: int, lr: float) -> dict[str, float]:
    """The program of every rank; returns its rank, and the accuracy on rows that were not trained on."""
    import torch
    import torch.nn.functional as F
    from sklearn.datasets import load_digits
    from torch import nn, optim

    import horovod.torch as hvd
    from horovod import progress

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
    for epoch in range(epochs):
        batches = list(
            zip(images[mine].split(batch_size), labels[mine].split(batch_size), strict=True)
        )
        for step, (batch, target) in enumerate(batches):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch), target)
            loss.backward()
            optimizer.step()
            # A bar in the driver's terminal or notebook.
            progress.report(step + 1, len(batches), epoch=epoch, epochs=epochs, loss=loss.item())
    with torch.no_grad():
        right = (model(images[:test]).argmax(1) == labels[:test]).float().mean()
    return {"rank": hvd.rank(), "accuracy": float(right)}


def main() -> None:
    """Train on Spark, and print what the ranks returned."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--master", help="default: that of spark-submit, or this machine")
    parser.add_argument("--num-proc", type=int, default=2, help="number of ranks")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="batch size of each rank")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of one rank")
    args = parser.parse_args()

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName("digits")
    if args.master or "SPARK_ENV_LOADED" not in os.environ:
        builder = builder.master(args.master or f"local[{args.num_proc}]")
    spark = builder.getOrCreate()
    results = horovod.spark.run(
        train, (args.epochs, args.batch_size, args.lr), num_proc=args.num_proc
    )
    spark.stop()
    for result in results:
        print(f"rank {result['rank']}: accuracy {result['accuracy']:.2%}")


if __name__ == "__main__":
    main()
