"""The registered operations: values, element types, groups, empty tensors, sets of ranks and queries."""

import numpy as np
import pytest
import tensorflow as tf
from tf_modes import MODES, run

import horovod.tensorflow.mpi_ops as hvd

hvd.init(process_sets="dynamic")
SIZE, RANK = hvd.size(), hvd.rank()
DTYPES = ["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"]
DTYPES += ["float16", "bfloat16", "float32", "float64", "bool"]
SHAPES = [(), (0,), (5,), (0, 3), (3, 2), (70_001,)]


def of(rank, shape, dtype="float32"):
    """What a rank brings: the same on every rank for the same arguments."""
    values = np.arange(np.prod(shape, dtype=int)).reshape(shape) % 5 + rank
    return np.asarray(values).astype(tf.as_dtype(dtype).as_numpy_dtype)


def everyone(shape, dtype="float32"):
    return [of(rank, shape, dtype) for rank in range(SIZE)]


def total(shape, dtype="float32"):
    if dtype == "bool":
        return np.any(everyone(shape, dtype), axis=0)
    return np.sum(everyone(shape, dtype), axis=0).astype(tf.as_dtype(dtype).as_numpy_dtype)


def part(rows):
    """This rank's rows of a reducescatter."""
    sizes = [rows // SIZE + (r < rows % SIZE) for r in range(SIZE)]
    return slice(sum(sizes[:RANK]), sum(sizes[: RANK + 1]))


def same(got, want):
    # NumPy cannot itself make an array of a bfloat16 scalar of TensorFlow's.
    got = got.numpy() if hasattr(got, "numpy") else got
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    assert np.array_equal(got, want)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_type_and_shape_eagerly(dtype, shape):
    mine = tf.constant(of(RANK, shape, dtype))
    same(hvd._allreduce(mine), total(shape, dtype))
    same(hvd.broadcast(mine, SIZE - 1), of(SIZE - 1, shape, dtype))
    same(mine, of(RANK, shape, dtype))
    if shape:
        same(hvd.allgather(mine), np.concatenate(everyone(shape, dtype)))
        same(hvd._reducescatter(mine), total(shape, dtype)[part(shape[0])])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_type_in_every_mode(mode, dtype):
    def operations(x):
        exchanged, received = hvd.alltoall(x, splits=[1] * SIZE)
        return [
            hvd._allreduce(x),
            hvd.allgather(x),
            hvd.broadcast(x, 0),
            hvd._reducescatter(x),
            exchanged,
            received,
            *hvd._grouped_allreduce([x, tf.reverse(x, [0])]),
            *hvd.grouped_allgather([x, x]),
            *hvd._grouped_reducescatter([x, x]),
        ]

    mine = of(RANK, (SIZE, 2), dtype)
    got = run(mode, operations, mine)
    summed = total((SIZE, 2), dtype)
    gathered = np.concatenate(everyone((SIZE, 2), dtype))
    same(got[0], summed)
    same(got[1], gathered)
    same(got[2], of(0, (SIZE, 2), dtype))
    same(got[3], summed[RANK : RANK + 1])
    same(got[4], np.stack([them[RANK] for them in everyone((SIZE, 2), dtype)]))
    same(got[5], np.ones(SIZE, np.int32))
    same(got[6], summed)
    same(got[7], summed[::-1])
    for other in got[8:10]:
        same(other, gathered)
    for other in got[10:12]:
        same(other, summed[RANK : RANK + 1])


@pytest.mark.parametrize("mode", MODES)
def test_operators_and_factors(mode):
    ranks = np.arange(1.0, SIZE + 1)
    operators = {
        hvd.Average: ranks.mean(),
        hvd.Sum: ranks.sum(),
        hvd.Min: 1.0,
        hvd.Max: SIZE,
        hvd.Product: ranks.prod(),
    }
    operations = [lambda x, op=op: hvd._allreduce(x, op=op) for op in operators]
    got = run(mode, lambda x: [operation(x) for operation in operations], np.full(3, RANK + 1.0))
    for result, want in zip(got, operators.values(), strict=True):
        assert np.allclose(result, want)
    # 0.1 is not what a 32-bit attribute makes of it.
    scaled = run(mode, lambda x: hvd._allreduce(x, prescale_factor=0.1), np.ones(1))
    assert scaled[0] == sum([0.1] * SIZE) or np.isclose(scaled[0], 0.1 * SIZE, rtol=1e-15, atol=0)
    scaled = run(mode, lambda x: hvd._allreduce(x, postscale_factor=0.1), np.ones(1))
    assert scaled[0] == 0.1 * SIZE
    zeros = run(mode, lambda x: hvd._allreduce(x, prescale_factor=0.0), np.ones(1))
    assert zeros[0] == 0.0
    scattered = run(mode, lambda x: hvd._reducescatter(x, postscale_factor=0.1), np.ones(SIZE))
    assert scattered[0] == 0.1 * SIZE


def test_names_of_operators_are_taken_as_well():
    same(hvd._allreduce(tf.constant([1 + RANK]), op="max"), np.array([SIZE], np.int32))


@pytest.mark.parametrize("mode", MODES)
def test_rows_that_differ(mode):
    own = np.full((RANK, 2), RANK, np.int64)
    want = np.repeat(np.arange(SIZE), np.arange(SIZE))[:, None].repeat(2, axis=1)
    got, pair = run(mode, lambda x: [hvd.allgather(x), hvd.grouped_allgather([x, x + 1])], own)
    same(got, want)
    same(pair[0], want)
    same(pair[1], want + 1)


@pytest.mark.parametrize("mode", MODES)
def test_splits_that_differ(mode):
    # Rank r sends s rows to rank s.
    rows = sum(range(SIZE))
    own = np.arange(rows, dtype=np.float32)[:, None] + 100 * RANK
    splits = np.arange(SIZE, dtype=np.int32)
    first = sum(range(RANK))
    want = np.concatenate(
        [np.arange(first, first + RANK, dtype=np.float32)[:, None] + 100 * r for r in range(SIZE)]
    )
    got, received = run(mode, lambda x, s: hvd.alltoall(x, splits=s), own, splits)
    same(got, want)
    same(received, np.full(SIZE, RANK, np.int32))


def test_splits_may_be_a_list_and_must_not_be_64_bit_tensors():
    got, received = hvd.alltoall(tf.range(SIZE), splits=[1] * SIZE)
    same(got, np.full(SIZE, RANK, np.int32))
    same(received, np.ones(SIZE, np.int32))
    same(hvd.alltoall(tf.range(SIZE)), np.full(SIZE, RANK, np.int32))
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

            def operations(x):
                return [
                    hvd._allreduce(x, process_set=some),
                    hvd.allgather(x, process_set=some),
                    hvd.broadcast(x, members[-1], process_set=some),
                    hvd._reducescatter(x, process_set=some),
                    hvd.alltoall(x, process_set=some),
                ]

            mine = np.full((len(members), 1), float(RANK))
            reduced, gathered, sent, scattered, exchanged = run(mode, operations, mine)
            assert np.all(reduced == sum(members))
            same(gathered, np.repeat(np.array(members, float), len(members))[:, None])
            assert np.all(sent == members[-1])
            assert np.all(scattered == sum(members))
            same(exchanged, np.array(members, float)[:, None])
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
