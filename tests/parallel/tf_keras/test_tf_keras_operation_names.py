"""Ranks pair gradients whatever each of them has made before: other layers, or the same optimizer in another order."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

import horovod.tensorflow.keras as hvd
from horovod.tensorflow import _gradient_reduction

hvd.init()


def _model():
    return keras.Sequential(
        [keras.layers.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)]
    )


@pytest.mark.parametrize("legacy", [False, True])
def test_a_model_trains_with_ranks_that_have_made_other_layers_and_wrapped_elsewhere(
    monkeypatch, legacy
):
    monkeypatch.setattr(_gradient_reduction, "fills_its_host", lambda: False)
    rank = hvd.rank()
    for _ in range(rank):
        _model()
    keras.utils.set_random_seed(1)
    model = _model()
    plain = keras.optimizers.legacy.SGD(0.01) if legacy else keras.optimizers.SGD(0.01)
    scaled = keras.mixed_precision.LossScaleOptimizer
    optimizer = (
        scaled(hvd.DistributedOptimizer(plain)) if rank else hvd.DistributedOptimizer(scaled(plain))
    )
    model.compile(optimizer=optimizer, loss="mse", jit_compile=False)
    x = np.random.RandomState(rank).randn(8, 3).astype("float32")
    model.fit(x, x[:, :1], batch_size=4, verbose=0)
    weights = hvd.allgather(tf.concat([tf.reshape(w, [1, -1]) for w in model.weights], 1))
    assert np.all(weights.numpy() == weights.numpy()[:1])
