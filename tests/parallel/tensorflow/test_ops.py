"""The registered operations beyond tests/conformance: memory, variables, large groups, sets that come and go."""

import numpy as np
import pytest
import tensorflow as tf
from tf_modes import MODES, run

import horovod.tensorflow.mpi_ops as hvd

hvd.init(process_sets="dynamic")
SIZE, RANK = hvd.size(), hvd.rank()


def same(got, want):
    # NumPy cannot itself make an array of a bfloat16 scalar of TensorFlow's.
    got = got.numpy() if hasattr(got, "numpy") else got
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    assert np.array_equal(got, want)


def test_splits_must_not_be_64_bit_tensors():
    with pytest.raises((tf.errors.InvalidArgumentError, TypeError, ValueError)):
        hvd.alltoall(tf.range(SIZE), splits=tf.ones(SIZE, tf.int64))


def test_a_group_of_a_thousand():
    group = [tf.constant([i, RANK]) for i in range(1000)]
    wants = [[i * SIZE, sum(range(SIZE))] for i in range(1000)]
    for function in (hvd._grouped_allreduce, tf.function(hvd._grouped_allreduce)):
        got = function(group)
        assert len(got) == 1000
        assert all(np.array_equal(g, w) for g, w in zip(got, wants, strict=True))


def test_empty_groups():
    assert hvd._grouped_allreduce([]) == []
    assert hvd._grouped_reducescatter([]) == []
    with pytest.raises(ValueError, match="empty list"):
        hvd.grouped_allgather([])


def test_a_large_tensor():
    mine = tf.fill([3_000_001], float(RANK + 1))
    want = sum(range(1, SIZE + 1))
    assert np.all(hvd._allreduce(mine).numpy() == want)
    assert np.all(tf.function(hvd._allreduce)(mine * 1).numpy() == want)
    assert np.all(mine.numpy() == RANK + 1)


def test_inputs_that_others_need_stay_as_they_are():
    """The result takes the input's memory only where nobody else has it."""

    @tf.function
    def uses_it_again(x):
        y = x + 1
        return hvd._allreduce(y), y, hvd.broadcast(y, 0), y * 2

    for _ in range(3):
        reduced, y, sent, doubled = uses_it_again(tf.fill([1000], float(RANK)))
        same(y, np.full(1000, RANK + 1, np.float32))
        same(doubled, 2 * np.full(1000, RANK + 1, np.float32))
        same(reduced, np.full(1000, sum(range(1, SIZE + 1)), np.float32))
        same(sent, np.ones(1000, np.float32))

    @tf.function
    def reduces_one_memory_twice(x):
        y = x + 1
        turned = tf.reshape(y, [10, 100])
        return hvd._allreduce(y), hvd._allreduce(turned), hvd._allreduce(tf.squeeze(turned[None]))

    for _ in range(3):
        for reduced in reduces_one_memory_twice(tf.fill([1000], float(RANK))):
            same(tf.reshape(reduced, [-1]), np.full(1000, sum(range(1, SIZE + 1)), np.float32))

    variable = tf.Variable(tf.fill([1000], float(RANK)))
    for function in (hvd._allreduce, tf.function(hvd._allreduce)):
        same(function(variable), np.full(1000, sum(range(SIZE)), np.float32))
        same(variable, np.full(1000, RANK, np.float32))
        same(hvd.broadcast(variable, SIZE - 1), np.full(1000, SIZE - 1, np.float32))
        same(variable, np.full(1000, RANK, np.float32))


def test_a_chain_whose_memory_is_handed_on():
    @tf.function
    def chain(x):
        for _ in range(5):
            x = hvd._allreduce(x * 1.0, op=hvd.Average)
            x = hvd.broadcast(x, 0)
        return x

    for _ in range(5):
        got = chain(tf.fill([257], float(RANK)))
        assert np.allclose(got, np.mean(range(SIZE)))


def test_the_output_of_the_root_of_a_broadcast_can_be_changed():
    """It shares the variable's memory, which an assignment must not reach through it."""
    variable = tf.Variable(tf.fill([64], float(RANK)))
    sent = hvd.broadcast(variable, 0)
    variable.assign_add(tf.ones(64))
    same(sent, np.zeros(64, np.float32))
    same(variable, np.full(64, RANK + 1, np.float32))


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_variables_are_given_the_root_s_values(mode):
    variables = [tf.Variable([1.0 * RANK, 2.0]), tf.Variable(RANK), tf.Variable(tf.zeros([0]))]

    def call():
        return hvd.broadcast_(variables, SIZE - 1)

    returned = call() if mode == "eager" else tf.function(call)()
    for values in (returned, variables):
        same(values[0], np.array([SIZE - 1, 2], np.float32))
        same(values[1], np.int32(SIZE - 1))
        same(values[2], np.zeros(0, np.float32))


@pytest.mark.parametrize("use_resource", [True, False])
def test_variables_of_a_graph_are_given_the_root_s_values(use_resource):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variable = tf.compat.v1.get_variable(
            "v", initializer=tf.constant([1.0 * RANK]), use_resource=use_resource
        )
        returned = hvd.broadcast_([variable], SIZE - 1)
        session.run(tf.compat.v1.global_variables_initializer())
        same(session.run(returned)[0], np.array([SIZE - 1], np.float32))
        same(session.run(variable), np.array([SIZE - 1], np.float32))


def test_variables_of_two_kinds_are_refused():
    with tf.Graph().as_default():
        both = [
            tf.compat.v1.get_variable(str(kind), initializer=1.0, use_resource=kind)
            for kind in (True, False)
        ]
        with pytest.raises(ValueError, match="same kind, resource or reference"):
            hvd.broadcast_(both, 0)


@pytest.mark.parametrize("mode", MODES)
def test_queries(mode):
    def queries():
        return [
            hvd.size_op(),
            hvd.rank_op(),
            hvd.local_size_op(),
            hvd.local_rank_op(),
            hvd.process_set_included_op(),
            hvd.process_set_included_op(77),
        ]

    got = run(mode, queries)
    want = [SIZE, RANK, hvd.local_size(), hvd.local_rank(), 1, -3]
    assert [int(g) for g in got] == want
    assert {np.asarray(g).dtype for g in got} == {np.dtype("int32")}


@pytest.mark.skipif(SIZE == 1, reason="a set of the only rank is that of all")
@pytest.mark.parametrize("mode", MODES)
def test_sets_of_ranks(mode):
    members = list(range(1, SIZE)) or [0]
    some = hvd.add_process_set(members)
    try:
        assert run(mode, lambda: hvd.size_op(some.process_set_id)) == len(members)
        included = run(mode, lambda: hvd.process_set_included_op(some.process_set_id))
        assert included == int(RANK in members)
        if RANK in members:
            sent = run(mode, lambda x: hvd.broadcast(x, SIZE - 1, process_set=some), np.ones(2))
            assert np.all(sent == 1)
        same(hvd._allreduce(tf.ones(1)), np.full(1, SIZE, np.float32))
    finally:
        hvd.remove_process_set(some)
    with pytest.raises(ValueError, match="not registered"):
        hvd._allreduce(tf.ones(1), process_set=some)


@pytest.mark.parametrize("mode", MODES)
def test_join(mode):
    """Ranks whose data ended earlier take part with zeros until the last has joined."""
    for step in range(3):
        if step <= RANK:
            got = hvd._allreduce(tf.ones(2))
            same(got, np.full(2, sum(step <= r for r in range(SIZE)), np.float32))
    last = run(mode, hvd.join)
    assert 0 <= int(last) < SIZE
    same(hvd._allreduce(tf.ones(1)), np.full(1, SIZE, np.float32))
