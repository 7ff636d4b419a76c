"""Gradients of the operations: in a tape, in a function, in a graph of TF 1."""

import numpy as np
import pytest
import tensorflow as tf

import horovod.tensorflow.mpi_ops as hvd

hvd.init(process_sets="dynamic")
SIZE, RANK = hvd.size(), hvd.rank()
MEAN = np.mean(np.arange(1.0, SIZE + 1))
MODES = ["eager", "function", "session"]


def gradient(mode, function, x, weight):
    """Of the sum of `function(x)` times this rank's weight, with respect to `x`."""
    x = np.asarray(x, np.float32)

    def loss(y):
        return tf.add_n([tf.reduce_sum(part) * weight for part in tf.nest.flatten(y)])

    def taped(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = loss(function(x))
        return tape.gradient(value, x)

    if mode == "session":
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            at = tf.compat.v1.placeholder(tf.float32, x.shape)
            [grad] = tf.compat.v1.gradients(loss(function(at)), [at])
            return session.run(grad, {at: x})
    taped = tf.function(taped) if mode == "function" else taped
    return taped(tf.constant(x)).numpy()


@pytest.mark.parametrize("mode", MODES)
def test_allreduce_reduces_in_the_same_way(mode):
    for op, want in ((hvd.Sum, MEAN * SIZE), (hvd.Average, MEAN)):
        scaled = gradient(
            mode, lambda x, op=op: hvd._allreduce(x, op=op, prescale_factor=0.5), [1, 2], RANK + 1.0
        )
        assert np.allclose(scaled, want * 0.5)
        pair = gradient(
            mode, lambda x, op=op: hvd._grouped_allreduce([x, x * 2], op=op), [1, 2], RANK + 1.0
        )
        assert np.allclose(pair, want * 3)


@pytest.mark.parametrize("mode", MODES)
def test_allgather_gives_each_rank_its_rows_of_the_average(mode):
    rows = np.ones((RANK + 1, 2))
    positions = np.arange(sum(range(1, SIZE + 1)), dtype=np.float32)[:, None]
    first = sum(range(1, RANK + 1))
    want = positions[first : first + RANK + 1] * np.ones((1, 2)) * MEAN

    got = gradient(mode, lambda x: hvd.allgather(x) * positions, rows, RANK + 1.0)
    assert np.allclose(got, want)
    got = gradient(
        mode,
        lambda x: [p * positions for p in hvd.grouped_allgather([x, x * 2])],
        rows,
        RANK + 1.0,
    )
    assert np.allclose(got, want * 3)


@pytest.mark.parametrize("mode", MODES)
def test_a_gathered_tensor_that_is_not_used(mode):
    got = gradient(mode, lambda x: hvd.grouped_allgather([x, x * 2])[0], np.ones((2, 2)), 1.0)
    assert np.allclose(got, 1.0)


@pytest.mark.parametrize("mode", MODES)
def test_broadcast_gives_the_average_to_the_root(mode):
    got = gradient(mode, lambda x: hvd.broadcast(x, SIZE - 1), [1, 2], RANK + 1.0)
    assert np.allclose(got, MEAN if RANK == SIZE - 1 else 0.0)


@pytest.mark.parametrize("mode", MODES)
def test_alltoall_sends_the_gradients_back(mode):
    rows = np.ones((2 * SIZE, 1))
    want = np.repeat(np.arange(1.0, SIZE + 1), 2)[:, None]
    got = gradient(mode, lambda x: hvd.alltoall(x, splits=[2] * SIZE)[0], rows, RANK + 1.0)
    assert np.allclose(got, want)
    got = gradient(mode, hvd.alltoall, rows, RANK + 1.0)
    assert np.allclose(got, want)
    # As many rows from each rank as no other rank sends: gradients go back to the rank that their rows came from.
    splits = [(RANK + to) % SIZE + 1 for to in range(SIZE)]
    want = np.repeat(np.arange(1.0, SIZE + 1), splits)[:, None]
    rows = np.ones((sum(splits), 1))
    got = gradient(mode, lambda x: hvd.alltoall(x, splits=splits)[0], rows, RANK + 1.0)
    assert np.allclose(got, want)


@pytest.mark.parametrize("mode", MODES)
def test_reducescatter_gathers_the_gradient(mode):
    rows = np.ones((SIZE, 2))
    want = np.arange(1.0, SIZE + 1)[:, None] * np.ones((1, 2))
    for op, factor in ((hvd.Sum, SIZE), (hvd.Average, 1)):
        got = gradient(
            mode,
            lambda x, op=op: hvd._reducescatter(
                x, op=op, prescale_factor=0.5, postscale_factor=3.0
            ),
            rows,
            RANK + 1.0,
        )
        assert np.allclose(got, want * factor * 1.5)
        got = gradient(
            mode,
            lambda x, op=op: hvd._grouped_reducescatter([x, x * 2], op=op),
            rows,
            RANK + 1.0,
        )
        assert np.allclose(got, want * factor * 3)


@pytest.mark.skipif(SIZE == 1, reason="a set of the only rank is that of all")
@pytest.mark.parametrize("mode", MODES)
def test_gradients_stay_in_their_set_of_ranks(mode):
    members = list(range(1, SIZE)) or [0]
    some = hvd.add_process_set(members)
    try:
        if RANK in members:
            count = len(members)
            own = np.ones((count, 1))
            got = gradient(mode, lambda x: hvd._allreduce(x, process_set=some), own, 1.0)
            assert np.allclose(got, count)
            got = gradient(mode, lambda x: hvd.allgather(x, process_set=some), own, RANK)
            assert np.allclose(got, np.mean(members))
            got = gradient(mode, lambda x: hvd._reducescatter(x, process_set=some), own, 1.0)
            assert np.allclose(got, count)
    finally:
        hvd.remove_process_set(some)


def test_queries_have_none():
    x = tf.constant(2.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = x * tf.cast(hvd.size_op(), tf.float32)
    assert tape.gradient(y, x).numpy() == SIZE


def test_second_derivatives():
    x = tf.constant([1.0, 2.0])
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = hvd._allreduce(x * x * x, op=hvd.Average)
        first = inner.gradient(y, x)
    second = outer.gradient(first, x)
    assert np.allclose(first, 3 * np.array([1.0, 4.0]))
    assert np.allclose(second, 6 * np.array([1.0, 2.0]))
