"""Train a small convolutional network on scikit-learn's handwritten digits with Keras 3, on any of its backends.

    KERAS_BACKEND=jax horovodrun -np 2 python keras_digits.py

Each rank trains on its own part of the samples. Rank 0 writes checkpoints and says how it goes.
"""

import argparse
import math
import os
from typing import Any

import keras
import numpy as np
from sklearn.datasets import load_digits

import horovod.keras as hvd

parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
parser.add_argument("--batch-size", type=int, default=32, help="samples per rank and step")
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--lr", type=float, default=0.002, help="learning rate of one rank")
parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")
parser.add_argument("--checkpoint-dir", help="where rank 0 writes checkpoints")
args = parser.parse_args()

hvd.init()
keras.utils.set_random_seed(42 + hvd.rank())

digits: Any = load_digits()
order = np.random.RandomState(0).permutation(len(digits.data))
x = (digits.images[order, :, :, np.newaxis] / 16.0).astype("float32")
y = digits.target[order].astype("int32")
train_count = 1440
x_train, y_train = x[:train_count], y[:train_count]
x_test, y_test = x[train_count:], y[train_count:]

# Every rank its own samples, and equally many: all ranks have to make the same number of steps.
each = train_count // hvd.size()
mine = slice(hvd.rank() * each, (hvd.rank() + 1) * each)
steps = math.ceil(each / args.batch_size)

model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(32, 3, activation="relu", padding="same"),
        keras.layers.MaxPooling2D(),
        keras.layers.Conv2D(64, 3, activation="relu", padding="same"),
        keras.layers.Flatten(),
        keras.layers.Dropout(0.25),
        keras.layers.Dense(10),
    ]
)

# More ranks make larger steps, so the learning rate grows with them; a warm-up makes that safe.
scaled_lr = args.lr * hvd.size()
compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(scaled_lr), compression=compression)
model.compile(
    optimizer=optimizer,
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)

callbacks = [
    # All ranks begin with rank 0's weights.
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    # Before all that reads metrics.
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(
        scaled_lr, warmup_epochs=2, steps_per_epoch=steps, verbose=1
    ),
    keras.callbacks.ReduceLROnPlateau(monitor="val_loss", patience=4, verbose=hvd.rank() == 0),
]
if hvd.rank() == 0 and args.checkpoint_dir:
    path = os.path.join(args.checkpoint_dir, "checkpoint-{epoch}.keras")
    callbacks.append(keras.callbacks.ModelCheckpoint(path))

model.fit(
    x_train[mine],
    y_train[mine],
    batch_size=args.batch_size,
    epochs=args.epochs,
    callbacks=callbacks,
    # Validation is on all ranks, or on none.
    validation_data=(x_test, y_test),
    # Of Keras' "auto" pyright concludes that it has to be a str.
    verbose=2 if hvd.rank() == 0 else 0,  # pyright: ignore[reportArgumentType]
)
loss, accuracy = model.evaluate(x_test, y_test, verbose=0)  # pyright: ignore[reportArgumentType]
if hvd.rank() == 0:
    print(f"{keras.backend.backend()}: test loss {loss:.3f}, accuracy {100 * accuracy:.1f} %")
