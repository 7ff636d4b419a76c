"""Failures of collective operations inside of Keras' graphs, as elastic training and users see them."""

import keras
import numpy as np
import pytest
from keras_support import BACKEND, SIZE

import horovod.keras as hvd
from horovod._keras._failures import _cause_first


@pytest.mark.skipif(BACKEND != "tensorflow", reason="TensorFlow's graphs")
@pytest.mark.skipif(SIZE == 1, reason="needs several ranks")
def test_the_first_line_of_a_graphs_error_is_the_cause():
    import horovod.tensorflow as operations

    class Model(keras.Model):
        def call(self, x):
            # Refused on all ranks: the shapes differ.
            return operations.allreduce(x[:, : hvd.rank() + 1], name="differs")

    model = Model()
    model.compile("sgd", "mse")
    with pytest.raises(Exception, match="Graph execution error") as caught:
        model.predict(np.ones((4, 64), "float32"), verbose=0)
    cause, *rest = _cause_first(str(caught.value)).splitlines()
    assert "differs" in cause
    assert "shape" in cause.lower()
    assert not cause.startswith(("Graph execution error", "Detected at"))
    assert "Graph execution error" in "\n".join(rest), "all that TensorFlow said follows"
