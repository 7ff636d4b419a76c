"""Replicas that never were equal, in `fit` on every backend: what a broadcast after the first batch makes equal is not
warned of."""

import keras
import numpy as np
import pytest
from keras_support import begin

import horovod.keras as hvd
import replica_warnings
from horovod.common import _replicas
from horovod.common.exceptions import ReplicasDifferError
from replica_warnings import begin_again, check_named, end_failed

begin()
found = replica_warnings.found
# So many steps no job makes before rank 0 has all reports.
MANY = 500


@pytest.fixture(autouse=True, scope="module")
def _usual_job():
    yield
    hvd.shutdown()
    begin()


def model_of(seed):
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(4, name="shared"),
            keras.layers.Dense(2, name="own"),
        ]
    )


def fit(model, optimizer, steps=4, callbacks=(), **options):
    model.compile(loss="mse", optimizer=optimizer, **options)
    x, y = np.ones((8 * steps, 3)), np.ones((8 * steps, 2))
    model.fit(x, y, batch_size=8, epochs=1, verbose=0, callbacks=list(callbacks))


def distributed():
    return hvd.DistributedOptimizer(keras.optimizers.SGD(0.01))


def test_a_forgotten_callback_is_named_with_the_tensor(found):
    fit(model_of(hvd.rank()), distributed())
    check_named(
        found(),
        "shared/kernel' differs between rank 0, rank 1",
        "2 of 4 parameters differ",
        "hvd.callbacks.BroadcastGlobalVariablesCallback(0)",
    )


@pytest.mark.parametrize(("row", "is_seen"), [(0, True), (1, False), (2, True)])
def test_of_large_models_the_ends_are_compared(found, monkeypatch, row, is_seen):
    monkeypatch.setattr(_replicas, "_WHOLE_BYTES_MAX", 0)
    monkeypatch.setattr(_replicas, "_BLOCK_BYTES", 16)
    model = model_of(7)
    kernel = model.get_layer("shared").kernel
    value = keras.ops.convert_to_numpy(kernel).copy()
    value[row] += hvd.rank()
    kernel.assign(value)
    fit(model, distributed())
    if is_seen:
        check_named(found(), "shared/kernel'")
    else:
        assert found() == []


def test_with_the_callback_there_is_no_warning(found):
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    fit(model_of(hvd.rank()), distributed(), callbacks=[broadcast])
    assert found() == []


@pytest.mark.skipif(keras.backend.backend() == "torch", reason="PyTorch has one step per execution")
def test_the_callback_is_in_time_after_several_steps_of_one_execution(found):
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model = model_of(hvd.rank())
    fit(model, distributed(), steps=6, callbacks=[broadcast], steps_per_execution=2)
    assert found() == []


def test_local_layers_may_differ(found):
    model = model_of(7)
    own = model.get_layer("own")
    own.kernel.assign(np.asarray(own.kernel) + hvd.rank())
    optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.01), local_layers=own)
    fit(model, optimizer)
    assert found() == []


def test_local_variables_of_the_callback_may_differ(found):
    model = model_of(hvd.rank())
    own = model.get_layer("own").trainable_weights
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=own)
    fit(model, distributed(), callbacks=[broadcast])
    assert found() == []


def test_an_optimizer_that_is_not_distributed_is_not_looked_at(found):
    fit(model_of(hvd.rank()), keras.optimizers.SGD(0.01))
    assert found() == []


def test_as_an_error_it_ends_fit_on_every_rank(found, monkeypatch):
    monkeypatch.setenv("HOROVOD_CHECK_REPLICAS", "error")
    begin_again()
    with pytest.raises(ReplicasDifferError, match="shared/kernel' differs"):
        fit(model_of(hvd.rank()), distributed(), steps=MANY)
    monkeypatch.delenv("HOROVOD_CHECK_REPLICAS")
    end_failed()
