"""Jacobians are reduced once, when they are finished; collectives in parallel loops are refused on all ranks."""

import pytest
import tensorflow as tf

import horovod.tensorflow as hvd

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
MEAN = sum(range(1, SIZE + 1)) / SIZE


def _jacobian(**options):
    weight = tf.Variable([1.0, 2.0])
    with tf.GradientTape() as tape:
        target = weight * weight * float(RANK + 1)
    return hvd.DistributedGradientTape(tape).jacobian(target, weight, **options)


@pytest.mark.parametrize("call", [_jacobian, tf.function(_jacobian)], ids=["eager", "graph"])
def test_a_jacobian_is_that_of_all_ranks(call):
    if call is not _jacobian:
        weight = tf.Variable([1.0, 2.0])

        @tf.function
        def call():
            with tf.GradientTape() as tape:
                target = weight * weight * float(RANK + 1)
            return hvd.DistributedGradientTape(tape).jacobian(target, weight)

    expected = [[2.0 * MEAN, 0.0], [0.0, 4.0 * MEAN]]
    tf.debugging.assert_near(call(), expected)


def test_a_batch_jacobian_is_that_of_all_ranks():
    x = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    with tf.GradientTape() as tape:
        tape.watch(x)
        target = x * x * float(RANK + 1)
    found = hvd.DistributedGradientTape(tape).batch_jacobian(target, x)
    tf.debugging.assert_near(found, tf.linalg.diag(2.0 * x * MEAN))


def test_jacobians_of_several_sources_keep_their_structure():
    a, b = tf.Variable([1.0]), tf.Variable([2.0])
    with tf.GradientTape() as tape:
        target = a * float(RANK + 1)
    found = hvd.DistributedGradientTape(tape).jacobian(target, {"a": a, "b": b})
    tf.debugging.assert_near(found["a"], [[MEAN]])
    assert found["b"] is None


def test_a_collective_in_a_vectorized_map_is_refused():
    with pytest.raises(NotImplementedError, match=r"HorovodAllreduce inside of tf.vectorized_map"):
        tf.vectorized_map(lambda x: hvd.allreduce(x, name="in_map"), tf.ones((3, 2)))


def test_a_collective_in_a_dataset_is_refused():
    data = tf.data.Dataset.from_tensor_slices(tf.ones((3, 2)))
    with pytest.raises(
        NotImplementedError, match=r"HorovodAllreduce inside of a function of a tf.data"
    ):
        data.map(lambda x: hvd.allreduce(x, name="in_data"))


def test_a_loop_over_a_dataset_in_a_function_runs_in_order():
    data = tf.data.Dataset.from_tensor_slices(tf.constant([1.0, 2.0]))

    @tf.function
    def total(data):
        found = tf.constant(0.0)
        for x in data:
            found += hvd.allreduce(x * float(RANK + 1), name="in_loop")
        return found

    tf.debugging.assert_near(total(data), 3.0 * MEAN)
