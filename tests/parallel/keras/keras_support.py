"""Small models whose training can be compared: with other ranks, and with one process that has all of the data."""

import os

import keras
import numpy as np

import horovod.keras as hvd
import horovod.numpy as arrays

# The first rank alone; of a single one it would be the global set again.
FIRST = arrays.ProcessSet([0])


def begin():
    """The job of these tests, which has one process set."""
    hvd.init(process_sets=[FIRST] if int(os.environ.get("HOROVOD_SIZE", "1")) > 1 else None)


begin()
SIZE, RANK = hvd.size(), hvd.rank()
BACKEND = keras.backend.backend()
GLOBAL_BATCH = 24  # divides by 1, 2, 3 and 4


def data(batches=6):
    """The same samples on all ranks."""
    rng = np.random.RandomState(7)
    x = rng.randn(batches * GLOBAL_BATCH, 5).astype("float32")
    y = (x @ rng.randn(5, 3) + 0.1 * rng.randn(len(x), 3)).astype("float32")
    return x, y


def mine(array):
    """This rank's part of each global batch, in the order of batches."""
    part = GLOBAL_BATCH // SIZE
    batches = array.reshape(-1, GLOBAL_BATCH, *array.shape[1:])
    return batches[:, RANK * part : (RANK + 1) * part].reshape(-1, *array.shape[1:])


def model(seed=3, *, wide=6):
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [keras.Input((5,)), keras.layers.Dense(wide, activation="tanh"), keras.layers.Dense(3)]
    )


def fit(its, optimizer, *, part=True, epochs=2, callbacks=(), **options):
    """Train without shuffling; on this rank's part of the data, or on all of it."""
    jit = {"jit_compile": options.pop("jit_compile")} if "jit_compile" in options else {}
    its.compile(optimizer=optimizer, loss=keras.losses.MeanSquaredError(), **jit)
    x, y = data()
    if part:
        x, y = mine(x), mine(y)
    batch = GLOBAL_BATCH // SIZE if part else GLOBAL_BATCH
    return its.fit(
        x,
        y,
        batch_size=batch,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
        **options,
    )


def apply(optimizer, grads, its):
    """Make one step with these gradients, as `fit` does: on JAX without state."""
    variables = its.trainable_variables
    if BACKEND != "jax":
        optimizer.apply(grads, variables)
        return
    new, state = optimizer.stateless_apply(
        [v.value for v in optimizer.variables], grads, [v.value for v in variables]
    )
    for variable, value in zip([*variables, *optimizer.variables], [*new, *state], strict=True):
        variable.assign(value)


def weights(its):
    return [np.array(keras.ops.convert_to_numpy(v.value)) for v in its.weights]


def same_on_all_ranks(values):
    """Bit by bit."""
    everyone = arrays.allgather_object([v.tobytes() for v in values])
    return all(its == everyone[0] for its in everyone)


def assert_close(got, want, tolerance=2e-5):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
