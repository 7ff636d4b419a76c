"""Mistakes and disagreements beyond the table of tests/conformance: as data, in flight, of names that meet."""

import threading

import pytest
import torch
from ops_support import still_works

import horovod.torch as hvd
from horovod.common.exceptions import DuplicateNameError
from horovod.torch.mpi_ops import _handle_map


@pytest.fixture(autouse=True)
def _the_job_goes_on():
    yield
    still_works()


def several_ranks():
    if hvd.size() == 1:
        pytest.skip("needs several ranks")


def odd():
    """Whether this rank is the one that differs from the others."""
    return hvd.rank() == hvd.size() - 1


# -- disagreements


def test_a_disagreement_says_as_data_who_asked_for_what():
    several_ranks()
    last = hvd.size() - 1
    with pytest.raises(hvd.HorovodInternalError) as error:
        hvd.allreduce(torch.ones(3 if odd() else 2), name="data")
    assert error.value.tensor == "allreduce.data"
    assert error.value.sides == ((0, "[2]"), (last, "[3]"))
    assert (error.value.rank, error.value.host, error.value.cause) == (None, None, None)


@pytest.mark.parametrize("op", ["mean", torch.distributed.ReduceOp.SUM])
def test_what_is_no_operator_is_refused_at_the_call(op):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    for call in (
        lambda: hvd.allreduce(torch.ones(2), op=op),
        lambda: hvd.DistributedOptimizer(optimizer, op=op),
    ):
        with pytest.raises(ValueError, match="not an operator of Horovod: expected "):
            call()
    hvd.DistributedOptimizer(optimizer, op="sum")


def test_control_characters_of_names_do_not_reach_the_terminal():
    several_ranks()
    name = "red \x1b[31m \r gone\nnext \x9b2J"
    with pytest.raises(hvd.HorovodInternalError) as error:
        hvd.allreduce(torch.ones(3 if odd() else 2), name=name)
    assert r"red \u{1b}[31m \r gone\nnext \u{9b}2J" in str(error.value)
    if hvd.rank() > 0:
        hvd.barrier()
    handle = hvd.allreduce_async(torch.ones(2), name=name)
    if hvd.rank() == 0:
        with pytest.raises(ValueError, match="same name as another tensor") as error:
            hvd.allreduce_async(torch.ones(2), name=name)
        assert r"\u{1b}[31m" in str(error.value)
        assert "\x1b" not in str(error.value)
        hvd.barrier()
    hvd.synchronize(handle)


def test_other_operations_in_flight_survive_a_disagreement():
    several_ranks()
    good = [hvd.allreduce_async(torch.ones(3), name=f"good.{i}", op=hvd.Sum) for i in range(5)]
    bad = hvd.allreduce_async(torch.ones(3 if odd() else 2), name="bad")
    good += [hvd.allreduce_async(torch.ones(3), name=f"good.{i}", op=hvd.Sum) for i in range(5, 10)]
    with pytest.raises(hvd.HorovodInternalError, match="Mismatched"):
        hvd.synchronize(bad)
    for handle in good:
        assert hvd.synchronize(handle).eq(hvd.size()).all()


def test_a_name_may_be_used_again_after_its_failure():
    several_ranks()
    with pytest.raises(hvd.HorovodInternalError):
        hvd.allreduce(torch.ones(3 if odd() else 2), name="again")
    assert hvd.allreduce(torch.ones(3), name="again", op=hvd.Sum).eq(hvd.size()).all()


# -- mistakes of one rank


def in_flight(name):
    """Start an operation that cannot end before the other ranks call `finish(name)`."""
    return hvd.allreduce_async_(torch.ones(2), name=name, op=hvd.Sum)


def test_a_name_in_flight_cannot_be_used_twice():
    several_ranks()
    text = "same name as another tensor"
    if hvd.rank() == 0:
        handle = in_flight("twice")
        before = len(_handle_map)
        for call in (hvd.allreduce, hvd.allreduce_, hvd.allreduce_async, hvd.allreduce_async_):
            with pytest.raises(DuplicateNameError, match=text) as error:
                call(torch.ones(2), name="twice", op=hvd.Sum)
            assert isinstance(error.value, ValueError)
            assert error.value.tensor == "allreduce.twice"
        # The same name is another key for another kind of operation.
        gathered = hvd.allgather_async(torch.ones(1), name="twice")
        assert len(_handle_map) == before + 1
        hvd.barrier()
    else:
        hvd.barrier()
        handle = in_flight("twice")
        gathered = hvd.allgather_async(torch.ones(1), name="twice")
    assert hvd.synchronize(handle).eq(hvd.size()).all()
    assert hvd.synchronize(gathered).shape == (hvd.size(),)


def test_a_group_whose_name_is_in_flight_leaves_nothing_behind():
    several_ranks()
    if hvd.rank() == 0:
        first = hvd.grouped_allreduce_async([torch.ones(2)] * 3, name="group", op=hvd.Sum)
        with pytest.raises(ValueError, match="same name as another tensor"):
            hvd.grouped_allreduce([torch.ones(2)] * 3, name="group", op=hvd.Sum)
        hvd.barrier()
    else:
        hvd.barrier()
        first = hvd.grouped_allreduce_async([torch.ones(2)] * 3, name="group", op=hvd.Sum)
    assert all(t.eq(hvd.size()).all() for t in hvd.synchronize(first))
    again = hvd.grouped_allreduce([torch.ones(2)] * 3, name="group", op=hvd.Sum)
    assert all(t.eq(hvd.size()).all() for t in again)


def test_kinds_of_operations_count_their_unnamed_calls_apart():
    # Rank 0 gathers between named operations of the others; their unnamed calls must still meet.
    handles = []
    for kind in ("reduce", "gather") if hvd.rank() % 2 else ("gather", "reduce"):
        call = hvd.allreduce_async if kind == "reduce" else hvd.allgather_async
        handles.append((kind, call(torch.full((1,), float(hvd.rank())))))
    for kind, handle in handles:
        result = hvd.synchronize(handle)
        if kind == "reduce":
            assert result.item() == (hvd.size() - 1) / 2
        else:
            assert result.tolist() == [float(r) for r in range(hvd.size())]


def test_an_operator_that_does_not_exist():
    with pytest.raises((ValueError, hvd.HorovodInternalError)):
        hvd.allreduce(torch.ones(2), op=77)


def test_operations_may_be_issued_from_several_threads():
    results = {}

    def work(thread):
        for i in range(20):
            tensor = torch.full((10,), float(thread * i))
            results[thread, i] = hvd.allreduce(tensor, name=f"thread.{thread}.{i}", op=hvd.Sum)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 80
    for (thread, i), total in results.items():
        assert total.eq(thread * i * hvd.size()).all()
