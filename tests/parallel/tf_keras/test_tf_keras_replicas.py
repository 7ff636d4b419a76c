"""Replicas that never were equal, in `fit` of Keras 2."""

import numpy as np
import tf_keras

import horovod.tensorflow.keras as hvd
import replica_warnings
from replica_warnings import check_named

hvd.init()
found = replica_warnings.found


def fit(seed, callbacks=(), local=None):
    tf_keras.utils.set_random_seed(seed)
    layers = [
        tf_keras.layers.Dense(4, input_shape=(3,), name="shared"),
        tf_keras.layers.Dense(2, name="own"),
    ]
    model = tf_keras.Sequential(layers)
    optimizer = hvd.DistributedOptimizer(tf_keras.optimizers.SGD(0.01))
    if local is not None:
        for variable in layers[-1].trainable_weights:
            variable.assign_add(np.full(variable.shape, local, np.float32))
            optimizer.register_local_var(variable)
    model.compile(loss="mse", optimizer=optimizer)
    model.fit(np.ones((32, 3)), np.ones((32, 2)), batch_size=8, verbose=0, callbacks=callbacks)


def test_a_forgotten_callback_is_named_with_the_tensor(found):
    fit(hvd.rank())
    check_named(
        found(),
        "'shared/kernel:0' differs between rank 0, rank 1",
        "hvd.callbacks.BroadcastGlobalVariablesCallback(0)",
    )


def test_with_the_callback_there_is_no_warning(found):
    fit(hvd.rank(), [hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    assert found() == []


def test_local_variables_may_differ(found):
    fit(7, local=hvd.rank())
    assert found() == []
