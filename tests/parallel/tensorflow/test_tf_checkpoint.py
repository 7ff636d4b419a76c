"""`hvd.Checkpoint` with variables of TensorFlow."""

import pytest
import tensorflow as tf

import horovod.tensorflow as hvd

hvd.init()


def state_of(*values):
    return hvd.elastic.TensorFlowState([tf.Variable(value) for value in values], step=0)


def test_all_ranks_go_on_from_the_file_of_rank_0(tmp_path):
    path = tmp_path / "training"
    hvd.Checkpoint(state_of([7.0, 8.0], 9.0), path).save()
    state = state_of([1.0, 1.0], float(hvd.rank()))
    assert hvd.Checkpoint(state, path).resume()
    assert [variable.numpy().tolist() for variable in state.variables] == [[7.0, 8.0], 9.0]


def test_a_file_with_more_variables_is_an_error_on_all_ranks(tmp_path):
    path = tmp_path / "training"
    hvd.Checkpoint(state_of(1.0, 2.0), path).save()
    text = r"the file has arrays of the shapes \[\(\), \(\)\], the state has \[\(\)\]"
    with pytest.raises(ValueError, match=text):
        hvd.Checkpoint(state_of(1.0), path).resume()
