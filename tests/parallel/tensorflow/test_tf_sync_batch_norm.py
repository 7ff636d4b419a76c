"""SyncBatchNormalization is the batch normalisation of the concatenated batch, in Keras 3 and in Keras 2."""

import importlib

import numpy as np
import pytest
import tensorflow as tf

import horovod.tensorflow as hvd
from horovod.tensorflow import sync_batch_norm
from horovod.tensorflow.sync_batch_norm import layer_class

ROWS = [3, 5, 2, 4]


def keras_of(generation):
    return importlib.import_module("keras" if generation == 3 else "tf_keras")


def layers(generation, **options):
    """A synchronised layer and the plain one of a single process."""
    plain = keras_of(generation).layers.BatchNormalization
    extra = {"fused": False} if generation == 2 else {}
    return layer_class(plain)(**options), plain(**options, **extra)


def batch(shape, seed=0):
    rows = ROWS[: hvd.size()]
    whole = np.random.default_rng(seed).normal(7.0, 3.0, (sum(rows), *shape)).astype(np.float32)
    start = sum(rows[: hvd.rank()])
    return whole, slice(start, start + rows[hvd.rank()])


def step(layer, x, incoming, mask=None):
    x = tf.convert_to_tensor(x)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = layer(x, training=True, **({} if mask is None else {"mask": mask}))
        value = tf.reduce_sum(y * incoming)
    vars = [
        getattr(v, "value", v) if not callable(getattr(v, "value", v)) else v
        for v in layer.trainable_variables
    ]
    return y, tape.gradient(value, [x, *vars])


@pytest.mark.parametrize("generation", [3, 2])
@pytest.mark.parametrize("way", ["eager", "function", "compiled"])
@pytest.mark.parametrize("shape", [(4,), (3, 5, 4)], ids=str)
def test_training_equals_one_process_on_the_whole_batch(generation, way, shape):
    sync, plain = layers(generation, momentum=0.5)
    for layer in (sync, plain):
        layer.build((None, *shape))
    call = {
        "eager": step,
        "function": tf.function(step),
        "compiled": tf.function(step, jit_compile=True),
    }[way]
    for seed in range(2):
        whole, mine = batch(shape, seed)
        incoming = np.random.default_rng(9).normal(size=whole.shape).astype(np.float32)
        y, (dx, dgamma, dbeta) = call(sync, whole[mine], incoming[mine])
        y_all, (dx_all, dgamma_all, dbeta_all) = step(plain, whole, incoming)
        np.testing.assert_allclose(y, y_all[mine], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(dx, dx_all[mine], rtol=1e-3, atol=1e-5)
        for part, total in ((dgamma, dgamma_all), (dbeta, dbeta_all)):
            np.testing.assert_allclose(hvd.allreduce(part, op=hvd.Sum), total, rtol=1e-4, atol=1e-4)
    for name in ("moving_mean", "moving_variance"):
        np.testing.assert_allclose(getattr(sync, name), getattr(plain, name), rtol=1e-4)
    # Evaluation asks nobody.
    if hvd.rank() == 0:
        np.testing.assert_allclose(sync(whole), plain(whole), rtol=1e-4, atol=1e-5)


def test_masked_steps_do_not_count():
    sync, plain = layers(3)
    for layer in (sync, plain):
        layer.build((None, 6, 4))
    whole, mine = batch((6, 4))
    mask = np.random.default_rng(3).random(whole.shape[:2]) > 0.4
    y, _ = step(sync, whole[mine], np.ones_like(whole[mine]), tf.constant(mask[mine]))
    y_all, _ = step(plain, whole, np.ones_like(whole), tf.constant(mask))
    np.testing.assert_allclose(y, y_all[mine], rtol=1e-3, atol=1e-4)


def test_a_large_mean_costs_no_digits():
    sync, _ = layers(3)
    whole, mine = batch((4,))
    centred = whole.astype(np.float64)
    want = (centred - centred.mean(0)) / np.sqrt(centred.var(0) + 1e-3)
    layer = layer_class(keras_of(3).layers.BatchNormalization)(dtype="float64")
    y, _ = step(layer, centred[mine] + 1e5, np.ones_like(centred[mine]))
    np.testing.assert_allclose(y, want[mine], rtol=1e-3, atol=1e-4)
    del sync


def test_half_inputs_and_names():
    layer = hvd.SyncBatchNormalization(dtype="mixed_float16")
    whole, mine = batch((4,))
    y = layer(tf.constant(whole[mine], tf.float16), training=True)
    assert y.dtype == tf.float16
    assert layer.name.startswith("sync_batch_normalization")
    import keras

    assert isinstance(layer, keras.layers.BatchNormalization)
    from horovod.tensorflow import SyncBatchNormalization

    assert SyncBatchNormalization is hvd.SyncBatchNormalization


def test_where_keras_lacks_what_the_layer_needs_there_is_none(monkeypatch):
    monkeypatch.setattr(tf.keras.layers, "BatchNormalization", object)
    assert not hasattr(hvd, "SyncBatchNormalization")
    assert not hasattr(sync_batch_norm, "SyncBatchNormalization")
    with pytest.raises(AttributeError, match="replaces _moments"):
        _ = hvd.SyncBatchNormalization
    with pytest.raises(ImportError, match="replaces _moments"):
        from horovod.tensorflow import SyncBatchNormalization  # noqa: F401


@pytest.mark.parametrize("fused", [True, None])
def test_fused_is_refused(fused):
    with pytest.raises(ValueError, match="does not support fused=True"):
        hvd.SyncBatchNormalization(fused=fused)
