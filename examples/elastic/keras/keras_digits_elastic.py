"""Train on handwritten digits with Keras 3 in an elastic job: ranks may die, hosts may come and go.

    horovodrun -np 2 --min-np 1 -H localhost:2 python keras_digits_elastic.py

A lost rank costs at most what came after the last commit.
"""

import argparse
from typing import Any

import keras
import numpy as np
from sklearn.datasets import load_digits

import horovod.keras as hvd

parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
parser.add_argument("--batch-size", type=int, default=32, help="samples per rank and step")
parser.add_argument("--batches-per-epoch", type=int, default=40, help="by all ranks together")
parser.add_argument("--batches-per-commit", type=int, default=5)
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--lr", type=float, default=0.002, help="learning rate of one rank")
args = parser.parse_args()

hvd.init()

digits: Any = load_digits()
x_all = (digits.data / 16.0).astype("float32")
y_all = digits.target.astype("int32")


def batches(epoch, batch):
    """Samples for this rank from a batch of an epoch on; other ones on each rank, and in each batch."""
    step = epoch * args.batches_per_epoch + batch
    while True:
        rng = np.random.RandomState([step, hvd.rank()])
        chosen = rng.randint(len(x_all), size=args.batch_size)
        yield x_all[chosen], y_all[chosen]
        step += 1


model = keras.Sequential(
    [keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
)
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(args.lr * hvd.size()))
model.compile(
    optimizer=optimizer,
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)


def on_reset():
    """More or fewer ranks: another learning rate."""
    model.optimizer.learning_rate = args.lr * hvd.size()


@hvd.elastic.run
def train(state):
    """Go on from where the state is."""
    model.fit(
        batches(state.epoch, state.batch),
        steps_per_epoch=args.batches_per_epoch // hvd.size(),
        epochs=args.epochs - state.epoch,
        callbacks=[
            hvd.callbacks.MetricAverageCallback(),
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.CommitStateCallback(state, args.batches_per_commit),
        ],
        verbose=2 if hvd.rank() == 0 else 0,  # pyright: ignore[reportArgumentType]
    )


state = hvd.elastic.KerasState(model, batch=0, epoch=0)
state.register_reset_callbacks([on_reset])
train(state)

loss, accuracy = model.evaluate(x_all, y_all, verbose=0)  # pyright: ignore[reportArgumentType]
if hvd.rank() == 0:
    print(f"{state.epoch} epochs are done: loss {loss:.3f}, accuracy {100 * accuracy:.1f} %")
