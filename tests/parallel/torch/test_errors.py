"""Mistakes: of one rank alone, found at the call; and disagreements, told to every rank. The job goes on after both."""

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


def fails_everywhere(message, *calls):
    """Each call must fail on every rank, with a message that names the tensor."""
    for i, call in enumerate(calls):
        with pytest.raises(hvd.HorovodInternalError, match=message):
            call(f"disagreement.{i}")
        still_works()


def odd():
    """Whether this rank is the one that differs from the others."""
    return hvd.rank() == hvd.size() - 1


# -- disagreements


def test_dtypes_differ():
    several_ranks()
    mine = torch.ones(4, dtype=torch.float64 if odd() else torch.float32)
    fails_everywhere(
        "Mismatched data types",
        lambda name: hvd.allreduce(mine, name=name),
        lambda name: hvd.allreduce_(mine, name=name),
        lambda name: hvd.allgather(mine, name=name),
        lambda name: hvd.broadcast(mine, 0, name=name),
        lambda name: hvd.broadcast_(mine, 0, name=name),
        lambda name: hvd.alltoall(torch.ones(hvd.size(), dtype=mine.dtype), name=name),
        lambda name: hvd.reducescatter(mine, name=name),
        lambda name: hvd.grouped_allreduce([torch.ones(2), mine], name=name),
        lambda name: hvd.grouped_allgather([torch.ones(2), mine], name=name),
        lambda name: hvd.grouped_reducescatter([torch.ones(2), mine], name=name),
    )


def test_a_disagreement_says_as_data_who_asked_for_what():
    several_ranks()
    last = hvd.size() - 1
    with pytest.raises(hvd.HorovodInternalError) as error:
        hvd.allreduce(torch.ones(3 if odd() else 2), name="data")
    assert error.value.tensor == "allreduce.data"
    assert error.value.sides == ((0, "[2]"), (last, "[3]"))
    assert (error.value.rank, error.value.host, error.value.cause) == (None, None, None)


def test_shapes_differ():
    several_ranks()
    mine = torch.ones(4, 3 if odd() else 2)
    fails_everywhere(
        r"Mismatched [A-Z]+ tensor shapes",
        lambda name: hvd.allreduce(mine, name=name),
        lambda name: hvd.allgather(mine, name=name),
        lambda name: hvd.broadcast(mine, 0, name=name),
        lambda name: hvd.alltoall(mine, splits=[1] + [0] * (hvd.size() - 1), name=name),
        lambda name: hvd.reducescatter(mine, name=name),
        lambda name: hvd.grouped_allreduce([torch.ones(2), mine], name=name),
    )


def test_numbers_of_dimensions_differ():
    several_ranks()
    mine = torch.ones(4) if odd() else torch.ones(4, 1)
    fails_everywhere(
        r"Mismatched [A-Z]+ tensor shapes",
        lambda name: hvd.allreduce(mine, name=name),
        lambda name: hvd.allgather(mine, name=name),
        lambda name: hvd.broadcast(mine, 0, name=name),
    )


def test_the_message_names_the_tensor_and_both_values():
    several_ranks()
    mine = torch.ones(3 if odd() else 2)
    with pytest.raises(hvd.HorovodInternalError) as error:
        hvd.allreduce(mine, name="who.is.it")
    text = str(error.value)
    assert "who.is.it" in text
    assert "[2]" in text
    assert "[3]" in text


def test_a_groups_message_names_the_member():
    several_ranks()
    mine = torch.ones(3 if odd() else 2)
    with pytest.raises(hvd.HorovodInternalError, match="together_2of3"):
        hvd.grouped_allreduce([torch.ones(1), mine, torch.ones(1)], name="together")


def test_factors_differ():
    several_ranks()
    factor = 2.0 if odd() else 1.0
    mine = torch.ones(4)
    fails_everywhere(
        "Mismatched prescale and/or postscale factors",
        lambda name: hvd.allreduce(mine, name=name, op=hvd.Sum, prescale_factor=factor),
        lambda name: hvd.allreduce(mine, name=name, op=hvd.Sum, postscale_factor=factor),
        lambda name: hvd.reducescatter(mine, name=name, op=hvd.Sum, prescale_factor=factor),
    )


def test_operators_differ():
    several_ranks()
    mine = torch.ones(4)
    fails_everywhere(
        "Mismatched (reduction operation|operations)",
        lambda name: hvd.allreduce(mine, name=name, op=hvd.Min if odd() else hvd.Max),
        lambda name: hvd.allreduce(mine, name=name, op=hvd.Sum if odd() else hvd.Adasum),
    )


def test_a_mismatch_of_operators_names_them():
    several_ranks()
    with pytest.raises(
        hvd.HorovodInternalError, match=r"reduction op (Min|Max), .* op (Max|Min)\."
    ):
        hvd.allreduce(torch.ones(4), name="named", op=hvd.Min if odd() else hvd.Max)


def test_operators_may_be_given_by_name():
    mine = torch.ones(2) + hvd.rank()
    for name in ("Sum", "sum", "Average", "min", "MAX", "Product"):
        op = getattr(hvd, name.capitalize())
        want = hvd.allreduce(mine, op=op)
        assert hvd.allreduce(mine, op=name).equal(want)
        assert hvd.allreduce_(mine.clone(), op=name).equal(want)
        assert hvd.grouped_allreduce([mine], op=name)[0].equal(want)
        if op in (hvd.Sum, hvd.Average):
            share = hvd.reducescatter(mine, op=op)
            assert hvd.reducescatter(mine, op=name).equal(share)
    parameter = torch.nn.Parameter(torch.ones(1))
    hvd.DistributedOptimizer(torch.optim.SGD([parameter]), op="sum")


@pytest.mark.parametrize("op", ["mean", "", 1.0, torch.distributed.ReduceOp.SUM])
def test_what_is_no_operator_is_refused_at_the_call(op):
    parameter = torch.nn.Parameter(torch.ones(1))
    for call in (
        lambda: hvd.allreduce(torch.ones(2), op=op),
        lambda: hvd.allreduce_(torch.ones(2), op=op),
        lambda: hvd.grouped_allreduce([torch.ones(2)], op=op),
        lambda: hvd.reducescatter(torch.ones(2), op=op),
        lambda: hvd.DistributedOptimizer(torch.optim.SGD([parameter]), op=op),
    ):
        with pytest.raises(ValueError, match="not an operator of Horovod: expected "):
            call()


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


def test_reducescatter_refuses_the_operator_before_the_tensor():
    for tensor in (torch.ones(4, dtype=torch.int32), torch.ones(4).to(torch.complex64)):
        for op in (hvd.Adasum, hvd.Min):
            with pytest.raises(hvd.HorovodInternalError, match="only supports AVERAGE and SUM"):
                hvd.reducescatter(tensor, op=op)
            with pytest.raises(hvd.HorovodInternalError, match="only supports AVERAGE and SUM"):
                hvd.grouped_reducescatter([tensor], op=op)


def test_roots_differ():
    several_ranks()
    root = 1 if odd() else 0
    fails_everywhere(
        "Mismatched BROADCAST root ranks",
        lambda name: hvd.broadcast(torch.ones(2), root, name=name),
        lambda name: hvd.broadcast_(torch.ones(2), root, name=name),
    )


def test_sizes_of_groups_differ():
    several_ranks()
    mine = [torch.ones(2)] * (3 if odd() else 2)
    with pytest.raises(hvd.HorovodInternalError, match="grouped_allreduce"):
        hvd.grouped_allreduce(mine, name="groups")


def test_a_failed_in_place_operation_leaves_the_tensor_alone():
    several_ranks()
    mine = torch.ones(3 if odd() else 2)
    with pytest.raises(hvd.HorovodInternalError):
        hvd.allreduce_(mine, name="untouched", op=hvd.Sum)
    assert mine.eq(1).all()


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


def test_refused_calls_do_not_shift_the_numbers_of_unnamed_ones():
    # In earlier versions a call that failed on one rank only counted, and later unnamed calls never met.
    if hvd.rank() == 0:
        for _ in range(3):
            with pytest.raises(ValueError, match="not supported"):
                hvd.allreduce(torch.ones(2).to_sparse())
            with pytest.raises(ValueError, match="invalid root rank"):
                hvd.broadcast(torch.ones(2), root_rank=hvd.size())
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).eq(hvd.size()).all()
    assert hvd.broadcast(torch.tensor(float(hvd.rank())), 0).item() == 0.0


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


@pytest.mark.parametrize("root", [-1, 100])
def test_a_root_that_does_not_exist(root):
    for call in (hvd.broadcast, hvd.broadcast_, hvd.broadcast_async, hvd.broadcast_async_):
        with pytest.raises(ValueError, match=f"invalid root rank {root} for"):
            call(torch.ones(2), root)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(3).to_sparse(),
        lambda: torch.ones(3, 3).to_sparse_csr(),
        lambda: torch.ones(3, device="meta"),
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    ],
    ids=["sparse", "csr", "meta", "quantized"],
)
def test_tensors_without_plain_memory_are_refused(make):
    for call in (
        hvd.allreduce,
        hvd.allreduce_,
        hvd.allgather,
        lambda t: hvd.broadcast(t, 0),
        lambda t: hvd.broadcast_(t, 0),
        hvd.alltoall,
        hvd.reducescatter,
        lambda t: hvd.grouped_allreduce([torch.ones(1), t]),
        lambda t: hvd.grouped_allreduce_([torch.ones(1), t]),
        lambda t: hvd.grouped_allgather([torch.ones(1), t]),
        lambda t: hvd.grouped_reducescatter([torch.ones(1), t]),
    ):
        with pytest.raises(ValueError, match=r"Tensor type torch\..* is not supported"):
            call(make())


def test_dtypes_that_cannot_be_reduced_are_refused():
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        for call in (hvd.allreduce, hvd.allreduce_, hvd.allreduce_async, hvd.reducescatter):
            with pytest.raises(ValueError, match="is not supported"):
                call(torch.ones(3).to(dtype))
    with pytest.raises(ValueError, match=r"torch.BoolTensor is not supported for op Average"):
        hvd.allreduce(torch.ones(3, dtype=torch.bool))
    with pytest.raises(ValueError, match="is not supported for op Max"):
        hvd.allreduce(torch.ones(3, dtype=torch.complex64), op=hvd.Max)


def test_what_is_no_tensor_is_refused():
    import numpy as np

    for wrong in (np.ones(3), np.ones(3, dtype=np.int32)):
        for call in (hvd.allreduce, hvd.allreduce_, hvd.allgather, lambda t: hvd.broadcast_(t, 0)):
            with pytest.raises((TypeError, AttributeError)):
                call(wrong)
    with pytest.raises((TypeError, AttributeError)):
        hvd.allreduce([1.0, 2.0])


def test_a_name_must_be_a_string():
    with pytest.raises(TypeError):
        hvd.allreduce(torch.ones(2), name=3)


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
