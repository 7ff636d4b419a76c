"""A state's own methods without `elastic.run`: a sync renews the snapshot."""

import keras
import numpy as np
from keras_support import RANK

import horovod.keras as hvd


def test_a_sync_renews_the_snapshot():
    net = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    net.set_weights([np.full((1, 1), RANK + 1.0, np.float32)])
    net.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)), loss="mse")
    state = hvd.elastic.KerasState(net, batch=RANK)
    state.sync()
    net.set_weights([np.full((1, 1), 9.0, np.float32)])
    state.batch = 9
    state.restore()
    assert net.get_weights()[0].item() == 1.0
    assert state.batch == 0
