"""Ranks pair gradients whatever each of them has made before: other layers, or the same optimizer in another order."""

import keras
import keras_support as support
import numpy as np
import pytest

import horovod.keras as hvd

_FACTOR = {"initial_scale": 8.0}


def _loss_scaled(inside):
    """The same optimizer; distributed itself, or around a distributed one, as after `load_model`."""
    kind = keras.optimizers.LossScaleOptimizer
    if inside:
        return kind(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), **_FACTOR)
    return hvd.DistributedOptimizer(kind(keras.optimizers.Adam(0.01), **_FACTOR))


@pytest.fixture
def one_by_one(monkeypatch):
    """Gradients travel one by one where the backend does that, as on hosts with cores to spare."""
    if support.BACKEND == "tensorflow":
        from horovod.tensorflow import _gradient_reduction

        monkeypatch.setattr(_gradient_reduction, "fills_its_host", lambda: False)


@pytest.mark.usefixtures("one_by_one")
def test_a_model_trains_with_ranks_that_have_made_other_layers_and_wrapped_elsewhere():
    for _ in range(support.RANK):
        support.model()
    its = support.model()
    jit = {"jit_compile": False} if support.BACKEND == "tensorflow" else {}
    support.fit(its, _loss_scaled(support.RANK == 0), epochs=1, **jit)
    weights = hvd.allgather(np.concatenate([w.ravel() for w in its.get_weights()])[None])
    assert np.all(np.asarray(weights) == np.asarray(weights)[:1])
