"""The usual Horovod script of TensorFlow 1, by `tf.compat.v1`: a graph, a hook and a monitored session.

    horovodrun -np 2 python tensorflow_mnist.py
    horovodrun -np 2 python tensorflow_mnist.py --use-adasum

The digits are those inside scikit-learn, so nothing is downloaded. `tf.layers` is gone from TensorFlow: the layers are
made of `tf.nn`.
"""

import argparse
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf
from sklearn.datasets import load_digits

import horovod.tensorflow as hvd

tf.disable_v2_behavior()
tf.logging.set_verbosity(tf.logging.INFO)


def parse_args():
    """Read the command line."""
    parser = argparse.ArgumentParser(description="TensorFlow 1 digits with Horovod")
    parser.add_argument(
        "--use-adasum", action="store_true", default=False, help="combine steps with Adasum"
    )
    parser.add_argument(
        "--gradient-predivide-factor",
        type=float,
        default=1.0,
        help="divide gradients by this before the sum instead of all after it",
    )
    parser.add_argument("--steps", type=int, default=800, help="steps of one process alone")
    parser.add_argument("--data-dir", help="folder for checkpoints, written by rank 0")
    return parser.parse_args()


def weights(name, shape):
    """A matrix or filter with the usual start, and its bias."""
    size = np.prod(shape[:-1])
    start = tf.random.truncated_normal(shape, stddev=float(np.sqrt(2.0 / size)))
    return tf.get_variable(f"{name}_w", initializer=start), tf.get_variable(
        f"{name}_b", initializer=tf.zeros(shape[-1])
    )


def conv_model(feature, target):
    """Two convolutions and two dense layers; returns the predictions and the loss."""
    with tf.variable_scope("conv_layer1"):
        w, b = weights("conv", [3, 3, 1, 16])
        hidden = tf.nn.relu(tf.nn.conv2d(feature, w, strides=1, padding="SAME") + b)
        hidden = tf.nn.max_pool(hidden, ksize=2, strides=2, padding="SAME")
    with tf.variable_scope("conv_layer2"):
        w, b = weights("conv", [3, 3, 16, 32])
        hidden = tf.nn.relu(tf.nn.conv2d(hidden, w, strides=1, padding="SAME") + b)
        hidden = tf.nn.max_pool(hidden, ksize=2, strides=2, padding="SAME")
    w, b = weights("dense1", [2 * 2 * 32, 64])
    hidden = tf.nn.relu(tf.matmul(tf.reshape(hidden, [-1, 2 * 2 * 32]), w) + b)
    w, b = weights("dense2", [64, 10])
    logits = tf.matmul(hidden, w) + b
    loss = tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels=target, logits=logits)
    )
    return tf.argmax(logits, 1), loss


def train_input_generator(x_train, y_train, batch_size=64):
    """Shuffled batches without end."""
    while True:
        p = np.random.permutation(len(x_train))
        x_train, y_train = x_train[p], y_train[p]
        for index in range(0, len(x_train) - batch_size + 1, batch_size):
            yield x_train[index : index + batch_size], y_train[index : index + batch_size]


def main():
    """Train, and say how well it went."""
    args = parse_args()

    # Horovod: initialize Horovod.
    hvd.init()

    digits: Any = load_digits()
    images = (digits.images[..., np.newaxis] / 16.0).astype(np.float32)
    is_test = np.arange(len(images)) % 5 == 0
    np.random.seed(hvd.rank())

    # Build model...
    image = tf.placeholder(tf.float32, [None, 8, 8, 1], name="image")
    label = tf.placeholder(tf.int64, [None], name="label")
    predict, loss = conv_model(image, label)

    lr_scaler = hvd.size()
    # By default, Adasum doesn't need scaling when increasing batch size. If used with NCCL,
    # scale lr by local_size
    if args.use_adasum:
        lr_scaler = hvd.local_size() if hvd.nccl_built() else 1

    # Horovod: adjust learning rate based on lr_scaler.
    opt = tf.train.AdamOptimizer(0.001 * lr_scaler)

    # Horovod: add Horovod Distributed Optimizer.
    opt = hvd.DistributedOptimizer(
        opt,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )

    global_step = tf.train.get_or_create_global_step()
    train_op = opt.minimize(loss, global_step=global_step)

    hooks = [
        # Horovod: BroadcastGlobalVariablesHook broadcasts initial variable states
        # from rank 0 to all other processes. This is necessary to ensure consistent
        # initialization of all workers when training is started with random weights
        # or restored from a checkpoint.
        hvd.BroadcastGlobalVariablesHook(0),
        # Horovod: adjust number of steps based on number of GPUs.
        tf.train.StopAtStepHook(last_step=args.steps // hvd.size()),
        tf.train.LoggingTensorHook(tensors={"step": global_step, "loss": loss}, every_n_iter=50),
    ]

    # Horovod: pin GPU to be used to process local rank (one GPU per process)
    config = tf.ConfigProto()
    config.gpu_options.allow_growth = True
    config.gpu_options.visible_device_list = str(hvd.local_rank())

    # Horovod: save checkpoints only on worker 0 to prevent other workers from
    # corrupting them.
    checkpoint_dir = args.data_dir if hvd.rank() == 0 else None
    batches = train_input_generator(images[~is_test], digits.target[~is_test])
    # The MonitoredTrainingSession takes care of session initialization,
    # restoring from a checkpoint, saving to a checkpoint, and closing when done
    # or an error occurs.
    guesses = y = None
    with tf.train.MonitoredTrainingSession(
        checkpoint_dir=checkpoint_dir, hooks=hooks, config=config
    ) as mon_sess:
        while not mon_sess.should_stop():
            # Run a training step synchronously.
            x, y = next(batches)
            _, guesses = mon_sess.run([train_op, predict], feed_dict={image: x, label: y})
    accuracy = np.mean(hvd.allgather_object(float(np.mean(guesses == y))))
    if hvd.rank() == 0:
        print(f"Accuracy in the last batch: {100 * accuracy:.2f}%")


if __name__ == "__main__":
    main()
