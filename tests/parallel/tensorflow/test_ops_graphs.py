"""The operations in TensorFlow's graphs: shapes before they run, names, attributes, and concurrent runs."""

import threading

import numpy as np
import pytest
import tensorflow as tf

import horovod.tensorflow.mpi_ops as hvd

hvd.init()
SIZE, RANK = hvd.size(), hvd.rank()


def shapes_of(function, shape, dtype=tf.float32):
    """Static shapes of the outputs of a function of a tensor of this shape."""
    with tf.Graph().as_default():
        outputs = function(tf.compat.v1.placeholder(dtype, shape))
        return [output.shape for output in tf.nest.flatten(outputs)]


def known(shape):
    return None if shape.rank is None else shape.as_list()


@pytest.mark.parametrize("shape", [None, [], [4], [2, 3], [None, 3]])
def test_shapes_that_stay(shape):
    for function in (
        hvd._allreduce,
        lambda x: hvd.broadcast(x, 0),
        lambda x: hvd._grouped_allreduce([x, x]),
    ):
        assert [known(s) for s in shapes_of(function, shape)] in ([shape], [shape] * 2)


@pytest.mark.parametrize("shape", [None, [4], [2, 3], [None, 3], [5, None]])
def test_shapes_whose_rows_are_known_late(shape):
    want = None if shape is None else [None, *shape[1:]]
    for function in (
        hvd.allgather,
        hvd._reducescatter,
        hvd.alltoall,
        lambda x: hvd.grouped_allgather([x, x]),
        lambda x: hvd._grouped_reducescatter([x, x]),
    ):
        assert [known(s) for s in shapes_of(function, shape)] in ([want], [want] * 2)


def test_shapes_of_received_splits():
    raw = hvd.MPI_LIB.horovod_alltoall
    given = shapes_of(lambda x: raw(x, splits=tf.ones(7, tf.int32)).received_splits, [7])
    assert known(given[0]) == [7]
    # Without splits one number for each rank comes all the same.
    equal = shapes_of(lambda x: raw(x, splits=tf.ones(0, tf.int32)).received_splits, [7])
    assert known(equal[0]) == [None]


def test_scalars_have_no_rows():
    for function, text in (
        (hvd.allgather, "at least rank 1"),
        (hvd.alltoall, "at least rank 1"),
        (hvd._reducescatter, "HorovodReducescatter does not support scalar inputs."),
        (lambda x: hvd._grouped_reducescatter([x]), "does not support scalar inputs."),
        (lambda x: hvd.grouped_allgather([x]), "at least rank 1"),
    ):
        with pytest.raises(ValueError, match=text):
            shapes_of(function, [])


def test_queries_give_one_number():
    for function in (hvd.size_op, hvd.rank_op, hvd.local_rank_op, hvd.local_size_op, hvd.join):
        assert known(shapes_of(lambda _, f=function: f(), [1])[0]) == []


def names_of(function):
    """Names of the operations of ours in the graph that a function of a tensor `x` makes."""
    with tf.Graph().as_default() as graph:
        function(tf.compat.v1.placeholder(tf.float32, [SIZE], name="x"))
        return [o.name for o in graph.get_operations() if o.type.startswith("Horovod")]


def test_names_follow_from_the_tensors():
    assert names_of(hvd._allreduce) == ["HorovodAllreduce_x_0"]
    assert names_of(hvd.allgather) == ["HorovodAllgather_x_0"]
    assert names_of(lambda x: hvd.broadcast(x, 0)) == ["HorovodBroadcast_x_0"]
    assert names_of(hvd.alltoall) == ["HorovodAlltoall_x_0"]
    assert names_of(hvd._reducescatter) == ["HorovodReducescatter_x_0"]
    pair = names_of(lambda x: hvd._grouped_allreduce([x, tf.identity(x, name="a/b")]))
    assert pair == ["HorovodGroupedAllreduce_x_0_a_b_0"]
    pair = names_of(lambda x: hvd.grouped_allgather([x, tf.identity(x, name="y")]))
    assert pair == ["HorovodGroupedAllgather_x_0_y_0"]


def test_names_that_are_given_stand_in_their_scope():
    def scoped(x):
        with tf.name_scope("outer"):
            hvd._allreduce(x, name="grad")
            hvd._allreduce(x, name="grad")

    assert names_of(scoped) == ["outer/grad", "outer/grad_1"]
    assert hvd._normalize_name("a/b:0-c.d") == "a_b_0_c_d"


def test_scopes_that_differ_between_ranks_can_be_left_out():
    def scoped(x):
        with tf.name_scope(f"rank{RANK}"):
            return [
                hvd._allreduce(x, name="same", ignore_name_scope=True),
                hvd.allgather(x, name="rows", ignore_name_scope=True),
            ]

    reduced, gathered = tf.function(scoped)(tf.ones(1))
    assert reduced.numpy() == SIZE
    assert gathered.shape == SIZE


def test_a_name_pairs_what_ranks_start_in_other_orders():
    """Disjoint in time, and every rank another order: they meet by their names."""

    def several(x):
        order = np.roll(np.arange(6), RANK)
        results = {int(i): hvd._allreduce(x * float(i), name=f"op{i}") for i in order}
        return [results[i] for i in range(6)]

    got = tf.function(several)(tf.ones(3))
    assert [g.numpy().tolist() for g in got] == [[i * SIZE] * 3 for i in range(6)]


def test_many_at_once_and_while_loops():
    @tf.function
    def many(x):
        return [hvd._allreduce(x + float(i), name=f"t{i}") for i in range(200)]

    for _ in range(3):
        got = many(tf.ones(2))
        assert [float(g[0]) for g in got] == [SIZE * (1.0 + i) for i in range(200)]

    @tf.function
    def loop(x):
        for _ in tf.range(20):
            x = hvd._allreduce(x, op=hvd.Average) + 1.0
        return x

    assert np.allclose(loop(tf.zeros(2)), 20.0)


def test_conditions():
    @tf.function
    def maybe(x, wanted):
        return tf.cond(wanted, lambda: hvd._allreduce(x), lambda: x)

    assert maybe(tf.ones(()), tf.constant(True)).numpy() == SIZE
    assert maybe(tf.ones(()), tf.constant(False)).numpy() == 1


def test_threads_of_the_program():
    """Functions that run in several threads at once."""
    functions = [tf.function(lambda x, i=i: hvd._allreduce(x, name=f"thread{i}")) for i in range(4)]
    ended: dict[int, list[float]] = {}

    def work(i):
        ended[i] = [float(functions[i](tf.constant(1.0 + step))) for step in range(20)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    want = [SIZE * (1.0 + step) for step in range(20)]
    assert [ended.get(i) for i in range(4)] == [want] * 4


def test_saved_graphs_keep_the_attributes():
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [2], name="x")
        hvd._allreduce(x, op=hvd.Sum, prescale_factor=0.1, name="mine")
        definition = graph.as_graph_def()
    with tf.Graph().as_default() as graph, tf.compat.v1.Session() as session:
        tf.import_graph_def(definition, name="")
        got = session.run("mine:0", {"x:0": np.ones(2, np.float32)})
    assert np.allclose(got, 0.1 * SIZE)
    node = next(n for n in definition.node if n.name == "mine")
    assert node.attr["prescale_factor"].f == np.float32(0.1)


def test_collectives_of_a_function_do_not_wait_for_each_other():
    """TensorFlow puts operations that are stateful into program order."""

    @tf.function
    def several(x):
        return [hvd._allreduce(x + float(i), name=f"side{i}") for i in range(3)]

    operations = several.get_concrete_function(tf.ones(2)).graph.get_operations()
    ours = [o for o in operations if o.type == "HorovodAllreduce"]
    assert [o.op_def.is_stateful for o in ours] == [False] * 3
    assert [list(o.control_inputs) for o in ours] == [[]] * 3
    with tf.Graph().as_default():
        assert hvd.size_op().op.op_def.is_stateful
