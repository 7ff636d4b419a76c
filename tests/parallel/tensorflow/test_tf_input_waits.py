"""Waits for elements of a `tf.data` dataset count as input without marks, where Python iterates."""

import os

import pytest
import tensorflow as tf

import horovod.tensorflow as hvd


@pytest.fixture
def measured():
    hvd.shutdown()
    os.environ["HOROVOD_METRICS"] = "1"
    hvd.init()
    yield
    hvd.shutdown()
    del os.environ["HOROVOD_METRICS"]
    hvd.init()


def input_seconds():
    rows = {row["rank"]: row for row in hvd.stats()["ranks"]}
    return rows[hvd.rank()]["input_seconds"]


def test_waits_in_a_dataset_are_input(measured):
    dataset = tf.data.Dataset.range(4)
    assert [int(element) for element in dataset] == [0, 1, 2, 3]
    eager = input_seconds()
    assert eager > 0
    assert list(dataset.as_numpy_iterator()) == [0, 1, 2, 3]
    assert input_seconds() > eager


def test_a_graph_iterates_as_before(measured):
    @tf.function
    def total(dataset):
        result = tf.constant(0, tf.int64)
        for element in dataset:
            result += element
        return result

    assert int(total(tf.data.Dataset.range(4))) == 6
