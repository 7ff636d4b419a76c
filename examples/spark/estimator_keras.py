"""Handwritten digits in a DataFrame: an estimator trains a Keras model on ranks in Spark tasks.

    python estimator_keras.py --num-proc 2
    spark-submit --master yarn estimator_keras.py --num-proc 4 --work-dir hdfs:///tmp/digits

The digits are those inside scikit-learn, so nothing is downloaded.
"""

import argparse
import os
import sys
import tempfile
from typing import Any

import tensorflow as tf
from pyspark.ml.linalg import Vectors
from pyspark.sql import SparkSession
from sklearn.datasets import load_digits

from horovod.spark.common.store import Store
from horovod.spark.keras import KerasEstimator

keras: Any = tf.keras


def parse_args():
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Keras digits with an estimator on Spark")
    parser.add_argument(
        "--master", help="Spark master; default: that of spark-submit, or this machine"
    )
    parser.add_argument("--num-proc", type=int, default=2, help="number of ranks")
    parser.add_argument("--batch-size", type=int, default=32, help="batch size of each rank")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate of one rank")
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
        (
            Vectors.dense((image - 4.9) / 6.0),
            Vectors.sparse(10, [int(label)], [1.0]),  # one-hot
            int(label),
        )
        for image, label in zip(digits.data, digits.target, strict=True)
    ]
    frame = spark.createDataFrame(rows, ["image", "digit", "number"])
    train, test = frame.repartition(args.num_proc, "image").randomSplit([0.8, 0.2], seed=42)

    keras.utils.set_random_seed(42)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    with tempfile.TemporaryDirectory() as folder:
        estimator = KerasEstimator(
            num_proc=args.num_proc,
            store=Store.create(args.work_dir or folder),
            model=model,
            optimizer=keras.optimizers.SGD(args.lr, momentum=0.5),
            loss="categorical_crossentropy",
            metrics=["accuracy"],
            feature_cols=["image"],
            label_cols=["digit"],
            validation=0.1,
            batch_size=args.batch_size,
            epochs=args.epochs,
            verbose=2,
            random_seed=42,
        )
        trained = estimator.fit(train).setOutputCols(["scores"])

    predicted = trained.transform(test).select("number", "scores").collect()
    right = sum(row["scores"].toArray().argmax() == row["number"] for row in predicted)
    print(f"Accuracy on {len(predicted)} test rows: {100 * right / len(predicted):.1f}%")
    spark.stop()


if __name__ == "__main__":
    main()
