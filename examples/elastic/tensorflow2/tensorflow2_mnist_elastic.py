"""The usual script with a gradient tape, made elastic: digits on processes that may die, leave and come.

    horovodrun -np 2 --min-np 1 --host-discovery-script ./hosts.sh python tensorflow2_mnist_elastic.py

where ./hosts.sh prints one line per host, such as `localhost:2`. It runs without an elastic launcher, too. The digits
are those inside scikit-learn, so nothing is downloaded.
"""

import argparse
from typing import Any

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import horovod.tensorflow as hvd


def parse_args():
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Elastic TensorFlow 2 digits with Horovod")
    parser.add_argument("--batch-size", type=int, default=64, help="batch size of each process")
    parser.add_argument("--steps", type=int, default=800, help="steps of one process alone")
    parser.add_argument("--lr", type=float, default=0.001, help="learning rate of one process")
    parser.add_argument("--batches-per-commit", type=int, default=10)
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def main():
    """Train, and say how well it went."""
    args = parse_args()

    # Horovod: initialize Horovod.
    hvd.init()

    # Horovod: pin GPU to be used to process local rank (one GPU per process)
    gpus = tf.config.experimental.list_physical_devices("GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    if gpus:
        tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")

    tf.keras.utils.set_random_seed(args.seed + hvd.rank())
    digits: Any = load_digits()
    images = (digits.images[..., np.newaxis] / 16.0).astype(np.float32)
    labels = digits.target.astype(np.int64)
    is_test = np.arange(len(images)) % 5 == 0
    dataset = tf.data.Dataset.from_tensor_slices((images[~is_test], labels[~is_test]))
    dataset = dataset.repeat().shuffle(2000).batch(args.batch_size)

    model = tf.keras.Sequential(
        [
            tf.keras.layers.Input((8, 8, 1)),
            tf.keras.layers.Conv2D(16, [3, 3], activation="relu"),
            tf.keras.layers.MaxPooling2D(pool_size=(2, 2)),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(64, activation="relu"),
            tf.keras.layers.Dense(10, activation="softmax"),
        ]
    )
    loss = tf.losses.SparseCategoricalCrossentropy()
    optimizer = tf.optimizers.Adam(args.lr * hvd.size())

    @tf.function
    def train_one_batch(data, target):
        with tf.GradientTape() as tape:
            probs = model(data, training=True)
            loss_value = loss(target, probs)

        # Horovod: add Horovod Distributed GradientTape.
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss_value, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss_value

    # Horovod: all ranks begin with the state of one of them, and go back to the last commit after a failure.
    @hvd.elastic.run
    def train(state):
        start_batch = state.batch
        # Horovod: adjust number of steps based on number of GPUs.
        for batch_idx, (data, target) in enumerate(
            dataset.take(args.steps // hvd.size() - start_batch)
        ):
            state.batch = start_batch + batch_idx
            loss_value = train_one_batch(data, target)
            if state.batch % 10 == 0 and hvd.local_rank() == 0:
                print(f"Step #{state.batch}\tLoss: {loss_value:.6f}", flush=True)

            # Horovod: commit state at the end of each batch
            if state.batch % args.batches_per_commit == 0:
                state.commit()

    # Horovod: the learning rate follows the number of processes.
    def on_state_reset():
        optimizer.learning_rate.assign(args.lr * hvd.size())

    state = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0)
    state.register_reset_callbacks([on_state_reset])
    train(state)

    guesses = np.argmax(model(images[is_test]), axis=1)
    if hvd.rank() == 0:
        print(f"Test accuracy: {100 * np.mean(guesses == labels[is_test]):.2f}%")


if __name__ == "__main__":
    main()
