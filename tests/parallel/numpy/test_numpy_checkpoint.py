"""`hvd.Checkpoint` of plain objects: rank 0's file, all ranks' state, and errors that all ranks have."""

import numpy as np
import pytest

import horovod.numpy as hvd
from horovod.common.elastic import ObjectState

hvd.init()
SIZE, RANK = hvd.size(), hvd.rank()


def test_all_ranks_go_on_from_the_file_of_rank_0(tmp_path):
    # Each rank has a folder of its own.
    path = tmp_path / "a.checkpoint"
    state = ObjectState(step=0, values=np.zeros(3))
    checkpoint = hvd.Checkpoint(state, path)
    assert not checkpoint.resume()
    state.step, state.values[:] = 7, 5.0
    checkpoint.save()
    state.step, state.values[:] = 8, 6.0
    state.save()
    assert [file.name for file in tmp_path.iterdir()] == (["a.checkpoint"] if RANK == 0 else [])

    other = ObjectState(step=RANK, values=np.ones(3))
    assert hvd.Checkpoint(other, path).resume()
    assert (other.step, other.values.tolist()) == (7, [5.0] * 3)
    other.step = 100
    other.restore()
    assert other.step == 7


def test_a_file_that_is_none_is_an_error_on_all_ranks(tmp_path):
    path = tmp_path / "broken"
    path.write_bytes(b"half of a")
    state = ObjectState(step=3)
    with pytest.raises(ValueError, match=r"^Cannot resume from .*broken: UnpicklingError: "):
        hvd.Checkpoint(state, path).resume()
    assert state.step == 3


def test_a_file_of_another_state_is_an_error_on_all_ranks(tmp_path):
    path = tmp_path / "other"
    hvd.Checkpoint(ObjectState(step=3), path).save()
    text = r"the file has the attributes \['step'\], the state has \['epoch'\]"
    with pytest.raises(ValueError, match=text):
        hvd.Checkpoint(ObjectState(epoch=3), path).resume()


class Refuses:
    """Can be copied, and cannot be pickled."""

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        raise TypeError("this has no state")


def test_a_save_that_fails_leaves_the_former_file_and_is_an_error_on_all_ranks(tmp_path):
    path = tmp_path / "kept"
    state = ObjectState(value=1)
    checkpoint = hvd.Checkpoint(state, path)
    checkpoint.save()
    state.value = Refuses()
    with pytest.raises(OSError, match=r"^Cannot save to .*kept: TypeError: this has no state"):
        checkpoint.save()
    state.value = 2
    assert checkpoint.resume()
    assert state.value == 1
    with pytest.raises(OSError, match=r"Cannot save to .*: FileNotFoundError: "):
        hvd.Checkpoint(state, tmp_path / "absent" / "file").save()


def test_a_step_without_a_signal_ends_nothing(tmp_path):
    path = tmp_path / "none"
    hvd.Checkpoint(ObjectState(step=0), path).end_step()
    assert not path.exists()


def test_a_state_that_is_none_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"the state is a dict, expected a state of hvd\.elastic"):
        hvd.Checkpoint({"step": 1}, tmp_path / "x")
