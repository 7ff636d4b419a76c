"""One rank of the step of a Keras CNN: computing alone, with ours, and with TensorFlow's own strategy."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

from frameworks_rank import free_ports, mirrored_strategy
from launch import Report

os.environ["KERAS_BACKEND"] = "tensorflow"

BATCH = 64
WARM_UP, BLOCKS, STEPS_PER_BLOCK = 5, 6, 5


def model(keras: Any) -> Any:
    """Three convolutions and two large layers: 6.1 million parameters in 10 tensors, small images."""
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((32, 32, 3)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(128, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(2560, activation="relu"),
            layers.Dense(300),
        ]
    )


def training(wrap: Callable[[Any], Any]) -> tuple[Callable[[Any, Any], Any], int]:
    """A compiled step on a batch, with `wrap` around the optimizer, and the number of parameters."""
    import keras
    import tensorflow as tf

    cnn = model(keras)
    optimizer = wrap(keras.optimizers.SGD(1e-3))
    optimizer.build(cnn.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")

    def step(images: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, cnn(images, training=True)) / BATCH
        gradients = tape.gradient(loss, cnn.trainable_variables)
        optimizer.apply(gradients, cnn.trainable_variables)
        return loss

    return step, int(cnn.count_params())


def main() -> None:
    """Train for some blocks of steps and report the seconds of each step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--peer", required=True, choices=["alone", "horovod", "mirrored"])
    options = parser.parse_args()
    rank, ranks = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
    report = Report(options.out, rank)

    import horovod.numpy as numbers

    numbers.init()
    ports = numbers.broadcast_object(free_ports(ranks) if rank == 0 else None)
    # Before anything else of TensorFlow, as it demands.
    strategy = mirrored_strategy(rank, ports) if options.peer == "mirrored" else None
    import tensorflow as tf

    generator = tf.random.Generator.from_seed(rank)
    images = generator.normal((BATCH, 32, 32, 3))
    labels = generator.uniform((BATCH,), 0, 300, tf.int32)
    if strategy is not None:
        with strategy.scope():
            step, parameters = training(lambda optimizer: optimizer)
        run = tf.function(lambda: strategy.run(step, args=(images, labels)))
    else:
        if options.peer == "horovod":
            import horovod.keras as hvd

            step, parameters = training(hvd.DistributedOptimizer)
        else:
            step, parameters = training(lambda optimizer: optimizer)
        run = tf.function(lambda: step(images, labels))

    def await_step() -> None:
        tf.nest.map_structure(lambda loss: loss.numpy(), run())

    for _ in range(WARM_UP):
        await_step()
    seconds = []
    for _ in range(BLOCKS):
        numbers.barrier()
        start = time.perf_counter()
        for _ in range(STEPS_PER_BLOCK):
            await_step()
        seconds.append((time.perf_counter() - start) / STEPS_PER_BLOCK)
    report.add(case="step", seconds=seconds, parameters=parameters)
    report.done()
    numbers.barrier()


if __name__ == "__main__":
    main()
