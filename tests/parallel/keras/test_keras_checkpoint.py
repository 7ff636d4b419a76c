"""`hvd.Checkpoint` and `hvd.check_finite` with models of Keras, on each backend."""

import keras
import numpy as np
import pytest

import horovod.keras as hvd

hvd.init()
SIZE, RANK = hvd.size(), hvd.rank()


def training(seed):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01, momentum=0.9))
    model.compile(optimizer, "mse")
    return hvd.elastic.KerasState(model, epoch=0)


def one_epoch(state):
    x = np.arange(12, dtype=np.float32).reshape(4, 3) / 12
    state.model.fit(x, x[:, :2], batch_size=2, shuffle=False, verbose=0)
    state.epoch += 1


def test_a_training_goes_on_from_the_file_as_if_it_had_not_ended(tmp_path):
    path = tmp_path / "training"
    state = training(0)
    one_epoch(state)
    hvd.Checkpoint(state, path).save()
    one_epoch(state)

    later = training(1 + RANK)
    assert hvd.Checkpoint(later, path).resume()
    assert later.epoch == 1
    one_epoch(later)
    for mine, want in zip(later.model.get_weights(), state.model.get_weights(), strict=True):
        np.testing.assert_allclose(mine, want, rtol=1e-6)


def test_nan_is_named_and_norms_are_computed():
    model = training(0).model
    values = {weight.path: weight.value for weight in model.weights}
    hvd.check_finite(values)
    ones = [keras.ops.ones((2, 2), "float16"), None]
    assert hvd.global_gradient_norm(ones) == 2
    if RANK == SIZE - 1:
        values["bad"] = keras.ops.convert_to_tensor(np.array([1, np.nan], np.float32))
    text = rf"rank {SIZE - 1}: 'bad' has 1 NaN and 0 infinite of 2 values"
    with pytest.raises(FloatingPointError, match=text):
        hvd.check_finite(values)
