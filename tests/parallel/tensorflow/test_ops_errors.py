"""Errors: TensorFlow's exceptions with the core's words, on every rank, and the job goes on."""

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
def test_the_size_of_a_set_that_does_not_exist(mode):
    error = tf.errors.InvalidArgumentError
    fails(mode, error, "Process set provided does not exist", lambda: hvd.size_op(77))


def test_a_group_has_one_type():
    with pytest.raises(tf.errors.InvalidArgumentError):
        hvd._grouped_allreduce([tf.ones(1), tf.ones(1, tf.float64)])
    with pytest.raises(TypeError):
        tf.function(lambda: hvd._grouped_allreduce([tf.ones(1), tf.ones(1, tf.float64)]))()


@pytest.mark.parametrize("mode", MODES)
def test_without_a_job(mode):
    hvd.shutdown()
    try:
        for function in (
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
