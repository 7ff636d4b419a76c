"""A Keras training for test_keras.py: its data depends on the number of the step and on the rank alone.

    keras_worker.py fit FOLDER        without elastic training: says what it catches
    keras_worker.py elastic FOLDER    commits every batch; a rank that joins takes the place of the lost one

If FOLDER/kill exists, the last rank kills itself in the middle of the second epoch, once.
"""

import hashlib
import os
import signal
import sys
from pathlib import Path

import keras
import numpy as np

import horovod.keras as hvd

MODE, FOLDER = sys.argv[1], Path(sys.argv[2])
STEPS, EPOCHS = 6, 3
DEADLY = STEPS + 3  # a step inside the second epoch


def note(text):
    print(text, flush=True)


def samples(step):
    """Batches from this step on."""
    while True:
        rng = np.random.RandomState(1000 * step + hvd.rank())
        x = rng.randn(4, 5).astype("float32")
        yield x, x[:, :3]
        step += 1


class Killer(keras.callbacks.Callback):
    """Ends the process where nobody expects it: between two batches, before the commit."""

    def __init__(self, first):
        super().__init__()
        self.step = first

    def on_batch_end(self, batch, logs=None):
        if self.step == DEADLY and hvd.rank() == hvd.size() - 1:
            try:
                (FOLDER / "kill").unlink()
            except FileNotFoundError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        self.step += 1


hvd.init()
keras.utils.set_random_seed(1)
model = keras.Sequential(
    [keras.Input((5,)), keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(3)]
)
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
model.compile(optimizer=optimizer, loss="mse")


def fit(step, epochs, *callbacks):
    note(f"rank {hvd.rank()} of {hvd.size()} goes on from step {step}")
    model.fit(
        samples(step),
        steps_per_epoch=STEPS,
        epochs=epochs,
        verbose=0,
        callbacks=[*callbacks],
    )


def plain():
    # The others must hear of it by themselves.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        fit(0, 1000, Killer(0))
    except Exception as error:
        note(f"rank {hvd.rank()} caught {type(error).__name__}: {error}; {error.__context__}")
        sys.exit(3)


@hvd.elastic.run
def train(state):
    step = state.epoch * STEPS + state.batch
    fit(
        step,
        EPOCHS - state.epoch,
        Killer(step),
        # In the order of the original's guide.
        hvd.elastic.CommitStateCallback(state),
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.UpdateEpochStateCallback(state),
    )


if MODE == "fit":
    plain()
else:
    state = hvd.elastic.KerasState(model, batch=0, epoch=0)
    train(state)
    values = [*model.weights, *optimizer.variables]
    data = b"".join(np.asarray(keras.ops.convert_to_numpy(v.value)).tobytes() for v in values)
    note(f"done after {int(keras.ops.convert_to_numpy(optimizer.iterations))} steps: ")
    note(f"result {state.epoch} {state.batch} {hashlib.sha256(data).hexdigest()}")
