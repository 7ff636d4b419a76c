"""`hvd.Checkpoint` and `hvd.check_finite` with models of Keras, on each backend."""

import os
import signal

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


def test_a_file_of_a_model_that_begins_alike_is_an_error_on_all_ranks(tmp_path):
    path = tmp_path / "training"
    layers = [keras.layers.Input((3,)), keras.layers.Dense(2), keras.layers.Dense(2)]
    hvd.Checkpoint(hvd.elastic.KerasState(keras.Sequential(layers)), path).save()
    state = hvd.elastic.KerasState(keras.Sequential(layers[:2]))
    text = r"the file has arrays of the shapes \[.*\(2, 2\), \(2,\)\], the state has \[\(3, 2\), \(2,\)\]"
    with pytest.raises(ValueError, match=text):
        hvd.Checkpoint(state, path).resume()


def test_sigterm_ends_fit_after_a_batch_on_all_ranks(tmp_path):
    path = tmp_path / "training"
    state = training(0)
    before = [weight.copy() for weight in state.model.get_weights()]
    checkpoint = hvd.Checkpoint(state, path)
    ended = []

    def end_batch(batch, logs):
        ended.append(batch)
        checkpoint.end_step()
        if batch == 0 and RANK == SIZE - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=end_batch)
    x = np.ones((8, 3), np.float32)
    former = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit, match="143"):
            state.model.fit(x, x[:, :2], batch_size=2, verbose=0, callbacks=[callback])
    finally:
        signal.signal(signal.SIGTERM, former)
    assert ended == [0, 1]
    later = training(1)
    assert hvd.Checkpoint(later, path).resume()
    # The weights after two batches.
    assert not np.allclose(later.model.get_weights()[0], before[0])


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
