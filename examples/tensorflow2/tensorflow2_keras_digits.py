"""The usual script for `tf.keras`, with the calls that scripts of the original Horovod make, on handwritten digits.

    horovodrun -np 2 python tensorflow2_keras_digits.py

Works with Keras 3, and with Keras 2 by TF_USE_LEGACY_KERAS=1 where tf_keras is installed.
"""

import argparse
from typing import Any

import tensorflow as tf
from sklearn.datasets import load_digits

import horovod.tensorflow.keras as hvd

parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
parser.add_argument("--steps", type=int, default=240, help="by all ranks together, per epoch")
parser.add_argument("--epochs", type=int, default=4)
args = parser.parse_args()

hvd.init()

gpus = tf.config.experimental.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")

digits: Any = load_digits()
dataset = tf.data.Dataset.from_tensor_slices(
    (
        tf.cast(digits.images[..., tf.newaxis] / 16.0, tf.float32),
        tf.cast(digits.target, tf.int64),
    )
)
dataset = dataset.shard(hvd.size(), hvd.rank()).repeat().shuffle(2000).batch(32)

mnist_model = tf.keras.Sequential(
    [
        tf.keras.layers.Input((8, 8, 1)),
        tf.keras.layers.Conv2D(32, [3, 3], activation="relu"),
        tf.keras.layers.Conv2D(64, [3, 3], activation="relu"),
        tf.keras.layers.MaxPooling2D(pool_size=(2, 2)),
        tf.keras.layers.Dropout(0.25),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(64, activation="relu"),
        tf.keras.layers.Dropout(0.5),
        tf.keras.layers.Dense(10, activation="softmax"),
    ]
)

scaled_lr = 0.001 * hvd.size()
opt = tf.optimizers.Adam(scaled_lr)
opt = hvd.DistributedOptimizer(opt, backward_passes_per_step=1, average_aggregated_gradients=True)

# The original asked for `experimental_run_tf_function=False`. It is not needed, and accepted.
mnist_model.compile(
    loss=tf.losses.SparseCategoricalCrossentropy(),
    optimizer=opt,
    metrics=["accuracy"],
    experimental_run_tf_function=False,
)

callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=3, verbose=1),
]

history = mnist_model.fit(
    dataset,
    steps_per_epoch=args.steps // hvd.size(),
    callbacks=callbacks,
    epochs=args.epochs,
    verbose=2 if hvd.rank() == 0 else 0,
)
if hvd.rank() == 0:
    print(f"accuracy {100 * history.history['accuracy'][-1]:.1f} %")
