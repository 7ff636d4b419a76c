"""What goes wrong: TensorFlow's exceptions with the core's words, on every rank, and the job goes on."""

import queue
import threading

import numpy as np
import pytest
import tensorflow as tf
from tf_modes import MODES, run

import horovod.tensorflow.mpi_ops as hvd

hvd.init()
SIZE, RANK = hvd.size(), hvd.rank()
several_ranks = pytest.mark.skipif(SIZE == 1, reason="needs several ranks")
ODD = RANK == SIZE - 1


@pytest.fixture(autouse=True)
def _the_job_goes_on():
    yield
    assert hvd._allreduce(tf.ones(())).numpy() == SIZE


def fails(mode, error, text, function, *arrays):
    with pytest.raises(error, match=text):
        run(mode, function, *arrays)
    assert hvd._allreduce(tf.ones(())).numpy() == SIZE


@several_ranks
@pytest.mark.parametrize("mode", MODES)
def test_ranks_that_disagree(mode):
    error = tf.errors.FailedPreconditionError
    shape = np.ones((3 if ODD else 2, 4 if ODD else 5), np.float32)
    own = np.ones((SIZE, 2), np.float64 if ODD else np.float32)
    for function in (
        lambda x: hvd._allreduce(x, name="a"),
        lambda x: hvd.allgather(x, name="b"),
        lambda x: hvd._reducescatter(x, name="c"),
        lambda x: hvd.broadcast(x, 0, name="d"),
        lambda x: hvd._grouped_allreduce([x, x], name="e"),
    ):
        fails(mode, error, r"Mismatched [A-Z]+ tensor shapes", function, shape)
        fails(mode, error, "Mismatched data types", function, own)
    same = np.ones((SIZE, 2), np.float32)
    fails(
        mode,
        error,
        "Mismatched BROADCAST root ranks",
        lambda x: hvd.broadcast(x, RANK, name="r"),
        same,
    )
    op = hvd.Max if ODD else hvd.Sum
    fails(
        mode, error, "Mismatched reduction op", lambda x: hvd._allreduce(x, op=op, name="o"), same
    )
    factor = 0.5 if ODD else 0.25
    fails(
        mode,
        error,
        "Mismatched prescale and/or postscale factors",
        lambda x: hvd._allreduce(x, prescale_factor=factor, name="f"),
        same,
    )


@several_ranks
@pytest.mark.parametrize("mode", ["function", "session"])
def test_ranks_that_do_different_things(mode):
    def one(x):
        return hvd.allgather(x, name="n") if ODD else hvd._allreduce(x, name="n")

    error = tf.errors.FailedPreconditionError
    fails(mode, error, "Mismatched operations", one, np.ones(2, np.float32))

    def sizes(x):
        return hvd._grouped_allreduce([x] * (3 if ODD else 2), name="g")

    fails(mode, error, "Mismatched group sizes", sizes, np.ones(2, np.float32))


@pytest.mark.parametrize("mode", MODES)
def test_arguments_without_a_meaning(mode):
    error = tf.errors.InvalidArgumentError
    x = np.ones((SIZE, 2), np.float32)
    fails(mode, error, "invalid root rank 99", lambda x: hvd.broadcast(x, 99), x)
    with pytest.raises(error, match="invalid root rank -1"):
        run(mode, lambda x: hvd.broadcast(x, -1), x)
    unknown = hvd.ProcessSet([0])
    unknown.process_set_id = 77
    fails(
        mode,
        error,
        "Process set provided does not exist",
        lambda x: hvd._allreduce(x, process_set=unknown),
        x,
    )
    fails(mode, error, "Process set provided does not exist", lambda _: hvd.size_op(77), x)
    fails(
        mode, error, "only supports AVERAGE and SUM", lambda x: hvd._reducescatter(x, op=hvd.Max), x
    )
    fails(
        mode,
        error,
        "Number of entries in splits",
        lambda x: hvd.alltoall(x, splits=[1] * (SIZE + 1)),
        x,
    )
    fails(mode, error, "Sum of splits", lambda x: hvd.alltoall(x, splits=[9] * SIZE), x)
    fails(mode, error, "1D splits", lambda x: hvd.alltoall(x, splits=[[1] * SIZE]), x)
    fails(mode, error, "verage", lambda x: hvd._allreduce(x > 0, op=hvd.Average), x)


@pytest.mark.skipif(SIZE == 1, reason="one rank divides everything")
def test_rows_that_cannot_be_divided():
    with pytest.raises(tf.errors.InvalidArgumentError, match="even multiple"):
        hvd.alltoall(tf.ones(SIZE + 1))


def test_scalars_have_no_rows():
    for function in (hvd.allgather, hvd.alltoall, hvd._reducescatter):
        with pytest.raises(tf.errors.OpError, match=r"rank-zero tensor|scalar|dimension"):
            function(tf.ones(()))


def test_types_that_are_not_taken():
    for function in (hvd._allreduce, hvd.allgather, lambda x: hvd.broadcast(x, 0)):
        with pytest.raises(tf.errors.InvalidArgumentError, match="allowed values"):
            function(tf.constant(["text"]))
        with pytest.raises(TypeError, match="allowed values"):
            tf.function(function)(tf.constant(["text"]))
    with pytest.raises(tf.errors.InvalidArgumentError):
        hvd._grouped_allreduce([tf.ones(1), tf.ones(1, tf.float64)])
    with pytest.raises(TypeError):
        tf.function(lambda: hvd._grouped_allreduce([tf.ones(1), tf.ones(1, tf.float64)]))()


def test_ranks_that_are_no_members():
    if not hvd._basics.is_initialized() or SIZE == 1:
        pytest.skip("needs several ranks")
    hvd.shutdown()
    first = hvd.ProcessSet([0])
    hvd.init(process_sets=[first])
    if RANK != 0:
        with pytest.raises(tf.errors.InvalidArgumentError, match="is not a member"):
            hvd._allreduce(tf.ones(1), process_set=first)
    else:
        assert hvd._allreduce(tf.ones(1), process_set=first).numpy() == [1.0]


@pytest.mark.parametrize("mode", MODES)
def test_without_a_job(mode):
    hvd.shutdown()
    try:
        for function in (
            hvd._allreduce,
            hvd.allgather,
            lambda x: hvd.broadcast(x, 0),
            hvd.alltoall,
            hvd._reducescatter,
            lambda x: hvd._grouped_allreduce([x, x]),
            lambda _: hvd.size_op(),
            lambda _: hvd.rank_op(),
            lambda _: hvd.process_set_included_op(),
            lambda _: hvd.join(),
        ):
            with pytest.raises(
                tf.errors.FailedPreconditionError,
                match=r"has not been initialized; use hvd\.init\(\)",
            ):
                run(mode, function, np.ones(2, np.float32))
    finally:
        hvd.init()


@several_ranks
def test_shutting_down_ends_what_waits():
    """Rank 0 waits for the others, which leave: its operation ends with what elastic training looks for."""
    if RANK == 0:
        with pytest.raises(tf.errors.UnknownError, match=r"shut down.*\[HorovodAllreduce\]"):
            tf.function(lambda x: hvd._allreduce(x, name="alone"))(tf.ones(3))
    hvd.shutdown()
    hvd.init()


@several_ranks
def test_one_name_twice_at_a_time():
    """Of two threads of rank 0 one is refused, while the other waits for the ranks that bring it once."""
    started = tf.function(lambda x: hvd._allreduce(x, name="same"))
    ended: queue.SimpleQueue[object] = queue.SimpleQueue()

    def start():
        try:
            ended.put(started(tf.ones(2)).numpy()[0])
        except tf.errors.InvalidArgumentError as error:
            ended.put(error)

    started.get_concrete_function(tf.ones(2))
    threads = [threading.Thread(target=start) for _ in range(2 if RANK == 0 else 1)]
    if RANK == 0:
        for thread in threads:
            thread.start()
        refused = ended.get()
        assert "same name" in str(refused)
    hvd.broadcast(tf.ones(()), 0)
    if RANK != 0:
        threads[0].start()
    assert ended.get() == SIZE
    for thread in threads:
        thread.join()
