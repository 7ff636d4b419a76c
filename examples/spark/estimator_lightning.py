"""Handwritten digits in a DataFrame: an estimator trains a Lightning module on ranks in Spark tasks.

    python estimator_lightning.py --num-proc 2
    spark-submit --master yarn estimator_lightning.py --num-proc 4 --work-dir hdfs:///tmp/digits

The digits are those inside scikit-learn, so nothing is downloaded.
"""

import argparse
import os
import sys
import tempfile
from typing import Any

import lightning.pytorch as pl
import torch
from pyspark.ml.linalg import Vectors
from pyspark.sql import SparkSession
from sklearn.datasets import load_digits

from horovod.spark.common.store import Store
from horovod.spark.lightning import TorchEstimator


class Digits(pl.LightningModule):
    """A small convolutional network; batches are dicts of columns."""

    def __init__(self, lr: float):
        super().__init__()
        self.lr = lr
        self.net = torch.nn.Sequential(
            torch.nn.Conv2d(1, 16, kernel_size=3, padding=1),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Flatten(),
            torch.nn.Linear(16 * 4 * 4, 10),
        )

    def forward(self, image):
        return self.net(image.float().reshape(-1, 1, 8, 8))

    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.cross_entropy(self(batch["image"]), batch["digit"].long())
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        right = (self(batch["image"]).argmax(dim=1) == batch["digit"]).float().mean()
        self.log("val_accuracy", right, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.5)


def parse_args():
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Lightning digits with an estimator on Spark")
    parser.add_argument(
        "--master", help="Spark master; default: that of spark-submit, or this machine"
    )
    parser.add_argument("--num-proc", type=int, default=2, help="number of ranks")
    parser.add_argument("--batch-size", type=int, default=32, help="batch size of each rank")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate of all ranks together")
    parser.add_argument("--work-dir", help="folder that driver and executors share")
    return parser.parse_args()


def main():
    """Train, and test on the rows that were not trained on."""
    args = parse_args()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName("digits")
    if args.master or "SPARK_ENV_LOADED" not in os.environ:
        builder = builder.master(args.master or f"local[{args.num_proc}]")
    spark = builder.getOrCreate()

    digits: Any = load_digits()
    rows = [
        (Vectors.dense((image - 4.9) / 6.0), int(label))
        for image, label in zip(digits.data, digits.target, strict=True)
    ]
    frame = spark.createDataFrame(rows, ["image", "digit"]).repartition(args.num_proc, "image")
    train, test = frame.randomSplit([0.8, 0.2], seed=42)

    torch.manual_seed(42)
    with tempfile.TemporaryDirectory() as folder:
        estimator = TorchEstimator(
            num_proc=args.num_proc,
            store=Store.create(args.work_dir or folder),
            model=Digits(args.lr),
            feature_cols=["image"],
            label_cols=["digit"],
            validation=0.1,
            batch_size=args.batch_size,
            epochs=args.epochs,
            random_seed=42,
        )
        trained = estimator.fit(train).setOutputCols(["scores"])

    print("logged last:", trained.getHistory())
    predicted = trained.transform(test).select("digit", "scores").collect()
    right = sum(row["scores"].toArray().argmax() == row["digit"] for row in predicted)
    print(f"Accuracy on {len(predicted)} test rows: {100 * right / len(predicted):.1f}%")
    spark.stop()


if __name__ == "__main__":
    main()
