"""Compiled functions in a graph that a session runs, as scripts of TensorFlow 1 have it."""

import pytest
import tensorflow as tf

import horovod.tensorflow as hvd

hvd.init()


@pytest.mark.parametrize("jit", [False, True])
def test_a_function_in_a_graph_of_a_session_reduces(jit):
    @tf.function(jit_compile=jit)
    def total(x):
        return hvd.allreduce(x, op=hvd.Sum, name="in_function")

    @tf.function(jit_compile=jit)
    def twice(x):
        return total(x) + total(2.0 * x)

    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        x = tf.compat.v1.placeholder(tf.float32, (3,))
        once, both = total(x), twice(x)
        for step in (1.0, 2.0):
            value = [step * (hvd.rank() + 1)] * 3
            expected = step * sum(range(1, hvd.size() + 1))
            assert session.run(once, {x: value}).tolist() == [expected] * 3
            assert session.run(both, {x: value}).tolist() == [3 * expected] * 3
