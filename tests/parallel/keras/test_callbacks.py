"""Callbacks in `fit`, the functions on values, and saving."""

import warnings

import keras
import numpy as np
import pytest
from keras_support import BACKEND, RANK, SIZE, fit, model, same_on_all_ranks, weights

import horovod.keras as hvd
import horovod.numpy as arrays


def test_broadcast_gives_all_the_roots_weights_and_optimizer_state():
    its = model(seed=RANK)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01 * (RANK + 1)))
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(SIZE - 1)
    fit(its, optimizer, callbacks=[callback], epochs=1)
    assert callback.broadcast_done
    assert same_on_all_ranks(weights(its))
    values = [np.array(keras.ops.convert_to_numpy(v.value)) for v in its.optimizer.variables]
    assert same_on_all_ranks(values)
    assert float(keras.ops.convert_to_numpy(optimizer.lr)) == pytest.approx(0.01 * SIZE)


def test_broadcast_leaves_local_variables_and_random_numbers():
    keras.utils.set_random_seed(RANK)
    its = keras.Sequential(
        [keras.Input((5,)), keras.layers.Dense(6), keras.layers.Dropout(0.5), keras.layers.Dense(3)]
    )
    local = its.layers[0].kernel
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[local])
    optimizer = hvd.PartialDistributedOptimizer(
        keras.optimizers.SGD(0.0), local_layers=its.layers[0]
    )
    fit(its, optimizer, callbacks=[callback], epochs=1)
    seeds = [v for v in its.variables if not any(v is w for w in its.weights)]
    kept = [local, *seeds]
    mine = [keras.ops.convert_to_numpy(v.value).tobytes() for v in kept]
    everyone = arrays.allgather_object(mine)
    assert len(mine) == 2
    if SIZE > 1:
        assert everyone[0][0] != everyone[-1][0]
        assert everyone[0][1] != everyone[-1][1]
    assert same_on_all_ranks(weights(its)[1:])
    with pytest.raises(ValueError, match=r"All local variables must be of tf\.Variable type"):
        hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=["kernel"])


class Logs(keras.callbacks.Callback):
    """Keeps what other callbacks see."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append(dict(logs))


def test_metrics_are_averaged_for_later_callbacks_and_history():
    before, after = Logs(), Logs()
    its = model()
    history = fit(
        its,
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)),
        callbacks=[before, hvd.callbacks.MetricAverageCallback(), after],
    )
    own = [logs["loss"] for logs in before.seen]
    mean = np.mean(arrays.allgather_object(own), axis=0)
    np.testing.assert_allclose([logs["loss"] for logs in after.seen], mean)
    np.testing.assert_allclose(history.history["loss"], mean)


@pytest.mark.skipif(SIZE == 1, reason="nobody to disagree with")
def test_metrics_that_only_some_ranks_have():
    callback = hvd.callbacks.MetricAverageCallback()
    logs = {"loss": 1.0} if RANK else {"loss": 1.0, "val_loss": 2.0}
    with pytest.raises(ValueError, match="rank 0 has"):
        callback.on_epoch_end(0, logs)


class Rates(keras.callbacks.Callback):
    """The learning rate of each batch."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_batch_end(self, batch, logs=None):
        value = self.model.optimizer.learning_rate
        self.seen.append(float(keras.ops.convert_to_numpy(value)))


def rates(*callbacks, epochs=3, optimizer=None):
    seen = Rates()
    history = fit(
        model(),
        hvd.DistributedOptimizer(optimizer or keras.optimizers.SGD(0.6)),
        callbacks=[*callbacks, seen],
        epochs=epochs,
    )
    return np.array(seen.seen).reshape(epochs, -1), history.history


def test_warmup(capsys):
    callback = hvd.callbacks.LearningRateWarmupCallback(0.6, warmup_epochs=2, verbose=1)
    seen, history = rates(callback)
    epoch = (np.arange(12) + 1) / 6
    want = 0.6 / SIZE * (epoch * (SIZE - 1) / 2 + 1)
    np.testing.assert_allclose(seen[:2].ravel(), want, rtol=1e-5)
    np.testing.assert_allclose(seen[2], 0.6, rtol=1e-5)
    np.testing.assert_allclose(history["lr"], seen[:, -1], rtol=1e-5)
    printed = "Epoch 2: finished gradual learning rate warmup to 0.6." in capsys.readouterr().out
    assert printed == (RANK == 0)


def test_schedules():
    constant = hvd.callbacks.LearningRateScheduleCallback(0.6, 0.5, start_epoch=1)
    seen, _ = rates(constant)
    np.testing.assert_allclose(seen[:, 0], [0.6, 0.6, 0.3], rtol=1e-5)
    stairs = hvd.callbacks.LearningRateScheduleCallback(
        0.6, lambda epoch: 1 / (1 + epoch), end_epoch=2
    )
    seen, _ = rates(stairs)
    np.testing.assert_allclose(seen, np.outer([0.6, 0.3, 0.3], np.ones(6)), rtol=1e-5)
    smooth = hvd.callbacks.LearningRateScheduleCallback(
        0.6, lambda epoch: 1 / (1 + epoch), staircase=False
    )
    seen, _ = rates(smooth)
    np.testing.assert_allclose(seen.ravel(), 0.6 / (1 + np.arange(18) / 6), rtol=1e-5)


def test_momentum_is_corrected_where_the_rate_changes():
    """Momentum from before counts as if gathered at the new rate: as plain SGD without the learning rate in it."""
    its = model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, momentum=0.5))
    its.compile(optimizer=optimizer, loss="mse")
    variables = its.trainable_variables
    optimizer.build(variables)
    callback = hvd.callbacks.LearningRateScheduleCallback(
        1.0, lambda epoch: 0.1**epoch, staircase=True
    )
    callback.set_model(its)
    callback.set_params({"steps": 1})
    callback.on_train_begin()
    before = weights(its)
    for epoch in range(2):
        callback.on_epoch_begin(epoch)
        callback.on_batch_begin(0)
        ones = [keras.ops.ones(v.shape) for v in variables]
        optimizer.apply(ones, variables)
        callback.on_batch_end(0)
    moved = before[0] - weights(its)[0]
    np.testing.assert_allclose(moved, 1.0 + 0.1 * (0.5 + 1.0), rtol=1e-5)


def test_what_schedules_need():
    with pytest.raises(ValueError, match="Parameter `initial_lr` is required"):
        hvd.callbacks.LearningRateScheduleCallback(None, 0.5)
    callback = hvd.callbacks.LearningRateWarmupCallback(0.1)
    callback.set_params({"steps": None})
    with pytest.raises(ValueError, match="Could not autodetect the number of steps per epoch"):
        callback.on_train_begin()


def test_best_model(tmp_path):
    callback = hvd.callbacks.BestModelCheckpoint(monitor="loss")
    callback.filepath = str(tmp_path / "best.keras")
    fit(model(), hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), callbacks=[callback])
    keras.models.load_model(callback.filepath)


@pytest.mark.parametrize("suffix", ["keras", "h5"])
@pytest.mark.filterwarnings("ignore")
def test_saving(tmp_path, suffix):
    """A saved model is an ordinary model; `load_model` continues from its state."""
    path = tmp_path / f"model.{suffix}"
    its = model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.02))
    fit(its, optimizer)
    its.save(path)
    plain = keras.models.load_model(path)
    assert isinstance(plain.optimizer, keras.optimizers.Adam)
    assert not hasattr(plain.optimizer, "_hvd")
    loaded = hvd.load_model(path)
    assert hasattr(loaded.optimizer, "_hvd")
    x, y = np.ones((4, 5), "float32"), np.ones((4, 3), "float32")
    for one in (its, loaded):
        assert int(keras.ops.convert_to_numpy(one.optimizer.iterations)) == 12
        one.fit(x, y, verbose=0)
    for a, b in zip(weights(its), weights(loaded), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


@keras.saving.register_keras_serializable("tests")
class HalfSGD(keras.optimizers.SGD):
    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient / 2, variable, learning_rate)


def test_saving_an_optimizer_of_ones_own(tmp_path):
    its = model()
    fit(its, hvd.DistributedOptimizer(HalfSGD(0.1)), epochs=1)
    its.save(tmp_path / "own.keras")
    assert type(keras.models.load_model(tmp_path / "own.keras").optimizer) is HalfSGD


def test_values():
    got = hvd.allreduce(np.arange(3.0) + RANK)
    np.testing.assert_allclose(keras.ops.convert_to_numpy(got), np.arange(3.0) + (SIZE - 1) / 2)
    got = hvd.allreduce(keras.ops.ones(2), op=hvd.Sum, compression=hvd.Compression.fp16)
    np.testing.assert_allclose(keras.ops.convert_to_numpy(got), SIZE)
    got = keras.ops.convert_to_numpy(hvd.allgather(np.full((RANK + 1, 2), RANK, np.float32)))
    assert got.shape == (SIZE * (SIZE + 1) // 2, 2)
    got = keras.ops.convert_to_numpy(hvd.broadcast(np.float32(RANK), SIZE - 1))
    assert got == SIZE - 1
    got = keras.ops.convert_to_numpy(hvd.reducescatter(np.ones((SIZE, 2), np.float32), op=hvd.Sum))
    np.testing.assert_allclose(got, np.full((1, 2), SIZE))


@pytest.mark.skipif(BACKEND == "tensorflow", reason="there it depends on the mode")
def test_global_variables():
    with pytest.raises(RuntimeError, match="BroadcastGlobalVariablesCallback"):
        hvd.broadcast_global_variables(0)


def test_old_keywords():
    from horovod._keras import _old_keywords

    _old_keywords._note_lr.cache_clear()
    _old_keywords._note_run_tf_function.cache_clear()
    with pytest.warns(
        UserWarning, match=r"learning_rate= in Keras 3.*TF_USE_LEGACY_KERAS=1"
    ) as noted:
        optimizer = keras.optimizers.SGD(lr=0.25)
    assert noted[0].filename == __file__, "the note is of the script's line"
    assert float(keras.ops.convert_to_numpy(optimizer.learning_rate)) == 0.25
    its = model()
    with pytest.warns(
        UserWarning, match=r"experimental_run_tf_function.*TF_USE_LEGACY_KERAS=1"
    ) as noted:
        its.compile(optimizer=optimizer, loss="mse", experimental_run_tf_function=False)
    assert noted[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        its.compile(optimizer=optimizer, loss="mse", experimental_run_tf_function=False)
    with pytest.raises(TypeError, match="no_such_keyword"):
        its.compile(optimizer=optimizer, no_such_keyword=1)
