"""Memory while training: it does not grow with the number of steps."""

import os
import resource
from pathlib import Path

import keras
import numpy as np
from keras_support import model

import horovod.keras as hvd

# More in the second tier: KERAS_FIT_STEPS=5000. (Names that begin with HVD_TEST_ do not reach the ranks.)
STEPS = int(os.environ.get("KERAS_FIT_STEPS", "600"))
KEPT_BYTES = 64  # per step: less than anything that a step could leave behind


def resident_bytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


class Resident(keras.callbacks.Callback):
    """The resident size after a third of the steps, and at the end."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def on_batch_end(self, batch, logs=None):
        if batch + 1 in (STEPS // 3, STEPS):
            self.sizes.append(resident_bytes())


def test_the_resident_size_stays():
    its = model(wide=64)
    its.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(1e-4)), loss="mse")
    x, y = np.ones((STEPS * 2, 5), "float32"), np.ones((STEPS * 2, 3), "float32")
    resident = Resident()
    its.fit(x, y, batch_size=2, verbose=0, callbacks=[resident])
    before, after = resident.sizes
    # Allocators take some megabytes at once.
    assert after - before < 4e6 + KEPT_BYTES * STEPS, resident.sizes
