"""Bringing all ranks to the root's state: variables in every mode, objects, and the hook."""

import numpy as np
import pytest
import tensorflow as tf

import horovod.tensorflow as hvd

v1 = tf.compat.v1
DTYPES = ["float16", "bfloat16", "float32", "float64", "int8", "uint16", "int32", "int64", "bool"]


def root():
    return hvd.size() - 1


def values(rank):
    return [
        np.arange(6).reshape(2, 3) + rank,
        np.float32(rank),
        np.zeros((0, 2), np.float32),
        np.array([1 + 2j * rank]),
    ]


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("mode", ["eager", "function", "session"])
def test_variables_get_the_roots_values(mode, inplace):
    def check(got):
        for one, want in zip(got, values(root()), strict=True):
            np.testing.assert_array_equal(one, want)

    given = values(hvd.rank())
    if mode == "session":
        given, wanted = given[:3], values(root())[:3]
        for use_resource in (True, False):
            with tf.Graph().as_default(), v1.Session() as session:
                vars = [
                    v1.get_variable(f"v{i}", initializer=v, use_resource=use_resource)
                    for i, v in enumerate(given)
                ]
                op = hvd.broadcast_variables(vars, root(), inplace=inplace)
                session.run(v1.global_variables_initializer())
                session.run(op)
                for one, want in zip(session.run(vars), wanted, strict=True):
                    np.testing.assert_array_equal(one, want)
        return
    vars = [tf.Variable(v) for v in (given if mode == "eager" else given[:3])]
    if mode == "eager":
        assert hvd.broadcast_variables(iter(vars), root(), inplace=inplace) is None
        check([v.numpy() for v in vars])
    else:
        tf.function(lambda: hvd.broadcast_variables(vars, root(), inplace=inplace))()
        for var, want in zip(vars, values(root()), strict=False):
            np.testing.assert_array_equal(var, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_variables_of_every_dtype(dtype):
    var = tf.Variable(tf.cast([0, 1 + hvd.rank()], dtype))
    hvd.broadcast_variables([var], root())
    assert var.dtype == tf.as_dtype(dtype)
    np.testing.assert_array_equal(
        tf.cast(var, tf.float64), tf.cast(tf.cast([0, 1 + root()], dtype), tf.float64)
    )


def test_variables_of_keras_and_of_no_numbers():
    import keras

    layer = keras.layers.Dense(2)
    layer.build((None, 3))
    hvd.broadcast_variables(layer.variables, 0)
    every = hvd.allgather_object([v.numpy() for v in layer.variables])
    for other in every:
        for one, mine in zip(other, every[0], strict=True):
            np.testing.assert_array_equal(one, mine)
    with pytest.raises(ValueError, match="cannot be broadcast"):
        hvd.broadcast_variables([tf.Variable(["text"])], 0)
    hvd.broadcast_variables([], 0)


def test_shapes_that_differ_are_reported():
    if hvd.size() == 1:
        pytest.skip("needs several ranks")
    with pytest.raises(hvd.HorovodInternalError, match=r"broadcast_variables\.1"):
        hvd.broadcast_variables([tf.Variable(1.0), tf.Variable([1.0] * (1 + hvd.rank()))], 0)
    hvd.broadcast_variables([tf.Variable(1.0)], 0)


def test_global_variables_need_a_graph():
    with pytest.raises(RuntimeError, match=r"hvd.broadcast_variables\(<model/optimizer variables>"):
        hvd.broadcast_global_variables(0)
    with tf.Graph().as_default(), v1.Session() as session:
        var = v1.get_variable("v", initializer=float(hvd.rank()))
        op = hvd.broadcast_global_variables(root())
        session.run(v1.global_variables_initializer())
        session.run(op)
        assert session.run(var) == root()


def test_the_hook_follows_the_graph():
    hook = hvd.BroadcastGlobalVariablesHook(root(), device="/cpu:0")
    assert isinstance(hook, v1.train.SessionRunHook)
    ops = []
    for _ in range(2):
        with tf.Graph().as_default(), v1.Session() as session:
            var = v1.get_variable("v", initializer=float(hvd.rank()))
            hook.begin()
            before = hook.bcast_op
            hook.begin()
            assert hook.bcast_op is before
            ops.append(before)
            session.run(v1.global_variables_initializer())
            hook.after_create_session(session, None)
            assert session.run(var) == root()
    assert ops[0] is not ops[1]


def test_objects():
    mine = {"rank": hvd.rank(), "big": np.arange(1000)}
    got = hvd.broadcast_object(mine if hvd.rank() == root() else None, root())
    assert got["rank"] == root()
    assert (got is mine) == (hvd.rank() == root())
    assert hvd.broadcast_object(hvd.rank(), root_rank=0, name="n") == 0
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))
    with tf.Graph().as_default(), v1.Session() as session:
        session.graph.finalize()
        assert hvd.broadcast_object(hvd.rank(), session=session) == 0
        assert hvd.allgather_object(hvd.rank(), session=session)[-1] == root()
        send = hvd.broadcast_object_fn(root_rank=root(), session=session)
        assert [send(hvd.rank()), send([hvd.rank()])] == [root(), [root()]]
