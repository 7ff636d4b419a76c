"""`hvd.Checkpoint` of plain objects: rank 0's file, all ranks' state, and errors that all ranks have."""

import os
import pickle
import signal
import threading

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


@pytest.mark.parametrize("content", [[1, 2], {"step": 3}])
def test_a_pickle_of_something_else_is_an_error_on_all_ranks(tmp_path, content):
    path = tmp_path / "foreign"
    path.write_bytes(pickle.dumps(content))
    text = rf"it holds a {type(content).__name__}, expected what hvd\.Checkpoint\.save has written"
    with pytest.raises(ValueError, match=text):
        hvd.Checkpoint(ObjectState(step=3), path).resume()


def test_a_folder_that_does_not_exist_is_an_error_before_the_training(tmp_path):
    checkpoint = hvd.Checkpoint(ObjectState(step=3), tmp_path / "absent" / "file")
    with pytest.raises(ValueError, match=r"^Cannot resume from .*absent/file: FileNotFoundError: "):
        checkpoint.resume()


def test_a_file_of_another_state_is_an_error_on_all_ranks(tmp_path):
    path = tmp_path / "other"
    hvd.Checkpoint(ObjectState(step=3), path).save()
    text = r"the file has the attributes \['step'\], the state has \['epoch'\]"
    with pytest.raises(ValueError, match=text):
        hvd.Checkpoint(ObjectState(epoch=3), path).resume()


def test_a_file_of_another_kind_of_state_is_an_error_on_all_ranks(tmp_path):
    path = tmp_path / "of_a_model"
    path.write_bytes(pickle.dumps({"values": {"step": 3}, "handled": {"model": {}}}))
    state = ObjectState(step=1)
    text = r"the file also has \['handled'\], which ObjectState does not read"
    with pytest.raises(ValueError, match=text):
        hvd.Checkpoint(state, path).resume()
    assert state.step == 1


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


def test_a_step_without_a_signal_ends_nothing(tmp_path, sigterm):
    path = tmp_path / "none"
    hvd.Checkpoint(ObjectState(step=0), path).end_step()
    assert not path.exists()


@pytest.fixture
def sigterm():
    former = signal.getsignal(signal.SIGTERM)
    yield former
    signal.signal(signal.SIGTERM, former)


def test_a_later_checkpoint_ends_what_an_earlier_one_was_asked_to_end(tmp_path, sigterm):
    state = ObjectState(step=5)
    hvd.Checkpoint(state, tmp_path / "earlier").end_step()
    if RANK == SIZE - 1:
        signal.raise_signal(signal.SIGTERM)
    later = hvd.Checkpoint(state, tmp_path / "later")
    with pytest.raises(SystemExit, match="143"):
        later.end_step()
    assert [file.name for file in tmp_path.iterdir()] == (["later"] if RANK == 0 else [])
    later.end_step()  # the signal counts once


def test_a_forked_child_has_the_handler_that_was_replaced(tmp_path, sigterm):
    hvd.Checkpoint(ObjectState(step=0), tmp_path / "none").end_step()
    assert signal.getsignal(signal.SIGTERM) != sigterm
    child = os.fork()
    if child == 0:
        os._exit(0 if signal.getsignal(signal.SIGTERM) == sigterm else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_the_main_thread_replaces_the_handler_also_after_another_thread(tmp_path, sigterm):
    checkpoint = hvd.Checkpoint(ObjectState(step=0), tmp_path / "none")
    other = threading.Thread(target=checkpoint.end_step)
    other.start()
    other.join(60)
    assert not other.is_alive()
    assert signal.getsignal(signal.SIGTERM) == sigterm
    checkpoint.end_step()
    assert signal.getsignal(signal.SIGTERM) != sigterm


def test_a_state_that_is_none_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"the state is a dict, expected a state of hvd\.elastic"):
        hvd.Checkpoint({"step": 1}, tmp_path / "x")


class Uncopied:
    """A value that the last rank cannot copy."""

    def __deepcopy__(self, _):
        if RANK == SIZE - 1:
            raise RuntimeError("not to be copied")
        return self


def test_a_state_that_one_rank_cannot_copy_is_an_error_on_all_ranks(tmp_path):
    state = ObjectState(value=1)
    checkpoint = hvd.Checkpoint(state, tmp_path / "file")
    state.value = Uncopied()
    if RANK == SIZE - 1:
        with pytest.raises(RuntimeError, match="not to be copied"):
            checkpoint.save()
    else:
        with pytest.raises(OSError, match="a rank could not copy its state"):
            checkpoint.save()
    state.value = 2
    checkpoint.save()
