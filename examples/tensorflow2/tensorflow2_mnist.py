"""The usual Horovod script with a gradient tape: handwritten digits on any number of processes and hosts.

    horovodrun -np 2 python tensorflow2_mnist.py
    horovodrun -np 4 -H host1:2,host2:2 python tensorflow2_mnist.py

The digits are those inside scikit-learn, so nothing is downloaded.
"""

import argparse
from typing import Any

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import horovod.tensorflow as hvd


def parse_args():
    """Read the command line."""
    parser = argparse.ArgumentParser(description="TensorFlow 2 digits with Horovod")
    parser.add_argument("--batch-size", type=int, default=64, help="batch size of each process")
    parser.add_argument("--steps", type=int, default=800, help="steps of one process alone")
    parser.add_argument("--lr", type=float, default=0.001, help="learning rate of one process")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument(
        "--fp16-allreduce", action="store_true", default=False, help="send gradients as float16"
    )
    parser.add_argument("--data-dir", help="folder for checkpoints, written by rank 0")
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

    # Horovod: each rank takes its part of the data; repeat() lets all ranks take equally many steps.
    dataset = tf.data.Dataset.from_tensor_slices((images[~is_test], labels[~is_test]))
    dataset = dataset.shard(hvd.size(), hvd.rank()).repeat().shuffle(1000).batch(args.batch_size)

    mnist_model = tf.keras.Sequential(
        [
            tf.keras.layers.Input((8, 8, 1)),
            tf.keras.layers.Conv2D(16, [3, 3], activation="relu"),
            tf.keras.layers.Conv2D(32, [3, 3], activation="relu"),
            tf.keras.layers.MaxPooling2D(pool_size=(2, 2)),
            tf.keras.layers.Dropout(0.25),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(64, activation="relu"),
            tf.keras.layers.Dropout(0.5),
            tf.keras.layers.Dense(10, activation="softmax"),
        ]
    )
    loss = tf.losses.SparseCategoricalCrossentropy()

    # Horovod: adjust learning rate based on number of GPUs.
    opt = tf.optimizers.Adam(args.lr * hvd.size())
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    checkpoint = tf.train.Checkpoint(model=mnist_model)

    @tf.function
    def training_step(images, labels, first_batch):
        with tf.GradientTape() as tape:
            probs = mnist_model(images, training=True)
            loss_value = loss(labels, probs)

        # Horovod: add Horovod Distributed GradientTape.
        tape = hvd.DistributedGradientTape(tape, compression=compression)

        grads = tape.gradient(loss_value, mnist_model.trainable_variables)
        opt.apply_gradients(zip(grads, mnist_model.trainable_variables, strict=True))

        # Horovod: broadcast initial variable states from rank 0 to all other processes. This is necessary to ensure
        # consistent initialization of all workers when training is started with random weights or restored from a
        # checkpoint.
        #
        # Note: broadcast should be done after the first gradient step to ensure optimizer initialization.
        if first_batch:
            hvd.broadcast_variables(mnist_model.variables, root_rank=0)
            # A method in Keras 2, a list in Keras 3.
            state: Any = opt.variables() if callable(opt.variables) else opt.variables
            hvd.broadcast_variables(state, root_rank=0)

        return loss_value

    # Horovod: adjust number of steps based on number of GPUs.
    for batch, (images_of_batch, labels_of_batch) in enumerate(
        dataset.take(args.steps // hvd.size())
    ):
        loss_value = training_step(images_of_batch, labels_of_batch, batch == 0)

        if batch % 10 == 0 and hvd.local_rank() == 0:
            print(f"Step #{batch}\tLoss: {loss_value:.6f}", flush=True)

    # Horovod: save checkpoints only on worker 0 to prevent other workers from corrupting it.
    if hvd.rank() == 0 and args.data_dir:
        checkpoint.save(f"{args.data_dir}/digits")

    guesses = np.argmax(mnist_model(images[is_test]), axis=1)
    right = float(np.mean(guesses == labels[is_test]))
    # Horovod: average metric values across workers.
    accuracy = hvd.allreduce(tf.constant(right), name="accuracy")
    if hvd.rank() == 0:
        print(f"Test accuracy: {100 * float(accuracy):.2f}%")


if __name__ == "__main__":
    main()
