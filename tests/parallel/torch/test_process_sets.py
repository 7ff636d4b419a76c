"""Process sets: registered at init or later, used by their members only, overlapping, removed."""

import os

import numpy as np
import pytest
import torch
from ops_support import still_works

import horovod.torch as hvd


def restart(**arguments):
    hvd.barrier()
    hvd.shutdown()
    hvd.init(**arguments)


@pytest.fixture
def dynamic(monkeypatch):
    """The job allows process sets to come and go; the usual one follows."""
    monkeypatch.delenv("HOROVOD_DYNAMIC_PROCESS_SETS", raising=False)
    restart(process_sets="Dynamic")
    yield
    os.environ.pop("HOROVOD_DYNAMIC_PROCESS_SETS", None)
    restart()


@pytest.fixture
def halves():
    """Even and odd ranks, as two sets of a job that registered them at its start; None where it has no member."""
    ranks = list(range(hvd.size()))
    even = hvd.ProcessSet(ranks[::2])
    if hvd.size() < 3:
        pytest.skip("needs three ranks")
    odd = hvd.ProcessSet(ranks[1::2])
    restart(process_sets=[even, odd])
    yield even, odd
    restart()


def test_a_set_describes_itself():
    ranks = hvd.ProcessSet([1, 0])
    assert ranks.ranks == [0, 1]
    assert ranks.process_set_id is None
    assert ranks.mpi_comm is None
    assert ranks.size() is None
    assert ranks.rank() is None
    assert ranks.included() is (hvd.rank() in (0, 1))
    assert str(ranks) == "ProcessSet(process_set_id=None, ranks=[0, 1], mpi_comm=None)"
    assert hvd.ProcessSet(range(3)).ranks == [0, 1, 2]
    assert hvd.ProcessSet([0]) != hvd.ProcessSet([0])


@pytest.mark.parametrize("wrong", [["a"], [0.0], [np.int64(0)], [None]])
def test_ranks_must_be_python_integers(wrong):
    with pytest.raises(ValueError, match="should be initialized with a list of process ranks"):
        hvd.ProcessSet(wrong)


def test_a_communicator_is_refused():
    with pytest.raises(ValueError, match="MPI communicator"):
        hvd.ProcessSet(object())


def test_the_global_set_holds_everybody():
    everyone = hvd.global_process_set
    assert everyone.size() == hvd.size()
    assert everyone.rank() == hvd.rank()
    assert everyone.included() is True


def test_an_unknown_id_is_refused():
    stale = hvd.ProcessSet([0])
    stale.process_set_id = 12345
    with pytest.raises(ValueError, match="does not exist or has not been registered"):
        stale.size()
    still_works()


def test_sets_cannot_be_changed_in_a_static_job(monkeypatch):
    monkeypatch.delenv("HOROVOD_DYNAMIC_PROCESS_SETS", raising=False)
    restart()
    with pytest.raises(ValueError, match="HOROVOD_DYNAMIC_PROCESS_SETS=1 to allow adding"):
        hvd.add_process_set([0])
    with pytest.raises(ValueError, match="HOROVOD_DYNAMIC_PROCESS_SETS=1 to allow removing"):
        hvd.remove_process_set(hvd.ProcessSet([0]))


def test_members_and_others(halves):
    even, odd = halves
    mine, other = (even, odd) if hvd.rank() % 2 == 0 else (odd, even)
    assert mine.included()
    assert mine.size() == len(mine.ranks)
    assert mine.rank() == mine.ranks.index(hvd.rank())
    hvd.barrier(process_set=mine)
    assert hvd.broadcast_object(hvd.rank(), mine.ranks[-1], process_set=mine) == mine.ranks[-1]
    assert hvd.allgather_object(hvd.rank(), process_set=mine) == mine.ranks

    assert other.included() is False
    assert other.size() == len(other.ranks)
    with pytest.raises(ValueError, match="not part of provided process set"):
        other.rank()
    for call in (hvd.barrier, lambda **its: hvd.allgather_object(1, **its)):
        with pytest.raises(ValueError, match=f"Rank {hvd.rank()} is not a member of the provided"):
            call(process_set=other)
    still_works()


def test_one_name_may_be_used_in_several_sets(halves):
    even, odd = halves
    mine = even if hvd.rank() % 2 == 0 else odd
    everyone = hvd.allreduce_async(torch.ones(2), name="shared", op=hvd.Sum)
    ours = hvd.allreduce_async(torch.ones(2), name="shared", op=hvd.Sum, process_set=mine)
    assert hvd.synchronize(ours).eq(len(mine.ranks)).all()
    assert hvd.synchronize(everyone).eq(hvd.size()).all()


def test_unnamed_operations_of_sets_are_counted_apart(halves):
    even, odd = halves
    for set_, count in ((even, 1), (odd, 4)):
        if set_.included():
            for _ in range(count):
                hvd.allreduce(torch.ones(1), process_set=set_)
    still_works()
    still_works()


def test_a_disagreement_inside_a_set_concerns_only_its_members(halves):
    even, odd = halves
    if even.included():
        mine = torch.ones(2 if hvd.rank() == 0 else 3)
        with pytest.raises(hvd.HorovodInternalError, match="Mismatched ALLREDUCE tensor shapes"):
            hvd.allreduce(mine, name="in the set", process_set=even)
        still_works(even)
    else:
        still_works(odd)
    still_works()


def test_duplicates_are_refused_at_init():
    several = hvd.size() > 1
    first, second = hvd.ProcessSet([0]), hvd.ProcessSet([0])
    whole = hvd.ProcessSet(range(hvd.size()))
    hvd.barrier()
    hvd.shutdown()
    if several:
        with pytest.raises(ValueError, match="process_sets entry number 1 is a duplicate"):
            hvd.init(process_sets=[first, second])
        assert hvd.is_initialized()
        assert first.process_set_id is not None
        assert second.process_set_id is None
        hvd.barrier()
        hvd.shutdown()
    with pytest.raises(ValueError, match="process_sets entry number 0 is a duplicate"):
        hvd.init(process_sets=[whole])
    restart()


@pytest.mark.parametrize("ranks", [[0, 0], [-1], [0, 1000]])
def test_impossible_sets_are_refused_at_init(ranks):
    hvd.barrier()
    hvd.shutdown()
    with pytest.raises(ValueError, match="Horovod initialization failed"):
        hvd.init(process_sets=[hvd.ProcessSet(ranks)])
    hvd.init()
    still_works()


def test_ids_belong_to_one_job():
    if hvd.size() == 1:
        pytest.skip("needs several ranks")
    subset = hvd.ProcessSet([0])
    restart(process_sets=[subset])
    assert subset.process_set_id not in (None, 0)
    hvd.init(process_sets=[hvd.ProcessSet([0])])  # the same set again: its id is found
    with pytest.raises(ValueError, match="already initialized"):
        hvd.init(process_sets=[hvd.ProcessSet([1])])
    restart()
    assert subset.process_set_id is None


def test_sets_come_and_go(dynamic):
    if hvd.size() == 1:
        pytest.skip("needs several ranks")
    last = hvd.size() - 1
    pair = hvd.add_process_set([0, last] if last > 1 else [0])
    assert isinstance(pair, hvd.ProcessSet)
    alone = hvd.ProcessSet([last])
    assert hvd.add_process_set(alone) is alone
    assert pair.process_set_id != alone.process_set_id
    if pair.included():
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=pair).item() == len(pair.ranks)
    if alone.included():
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=alone).item() == 1
    still_works()

    assert hvd.remove_process_set(pair) is True
    assert pair.process_set_id is None
    assert pair.size() is None
    assert hvd.remove_process_set(pair) is False
    assert hvd.remove_process_set(hvd.global_process_set) is False
    assert hvd.global_process_set.process_set_id == 0
    assert hvd.remove_process_set(hvd.ProcessSet([0])) is False
    with pytest.raises(ValueError, match="This process set is not registered, or was removed"):
        hvd.allreduce(torch.ones(1), process_set=pair)
    again = hvd.add_process_set(pair)
    still_works(again) if again.included() else None
    assert hvd.remove_process_set(again)
    assert hvd.remove_process_set(alone)
    still_works()


def test_duplicates_are_refused_later_too(dynamic):
    everyone = list(range(hvd.size()))
    with pytest.raises(ValueError, match="Attempted to add a duplicate process set"):
        hvd.add_process_set(everyone)
    if hvd.size() > 1:
        first = hvd.add_process_set([0])
        with pytest.raises(ValueError, match="Attempted to add a duplicate process set"):
            hvd.add_process_set([0])
        hvd.remove_process_set(first)
    still_works()


@pytest.mark.parametrize("ranks", [[0, 0], [-1], [0, 1000]])
def test_impossible_sets_do_not_harm_the_job(dynamic, ranks):
    with pytest.raises(ValueError, match=r"duplicate rank|invalid rank"):
        hvd.add_process_set(ranks)
    still_works()


def test_ranks_that_add_different_sets_are_told(dynamic):
    if hvd.size() < 2:
        pytest.skip("needs several ranks")
    with pytest.raises((ValueError, hvd.HorovodInternalError)):
        hvd.add_process_set([0] if hvd.rank() == 0 else [1])
    still_works()


def test_many_overlapping_sets_at_once(dynamic):
    if hvd.size() < 3:
        pytest.skip("needs three ranks")
    size = hvd.size()
    pairs = [hvd.add_process_set([r, (r + 1) % size]) for r in range(size if size > 2 else 1)]
    for step in range(10):
        handles = []
        order = pairs if hvd.rank() % 2 else pairs[::-1]
        for pair in order:
            if pair.included():
                value = torch.full((1000,), float(hvd.rank()))
                handle = hvd.allreduce_async(value, name=f"{step}", op=hvd.Sum, process_set=pair)
                handles.append((pair, handle))
        for pair, handle in handles:
            assert hvd.synchronize(handle).eq(sum(pair.ranks)).all()
    for pair in pairs:
        assert hvd.remove_process_set(pair)
    still_works()
