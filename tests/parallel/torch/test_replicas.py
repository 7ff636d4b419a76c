"""Replicas that never were equal: rank 0 names tensors and ranks; what differs on purpose is not blamed."""

import pytest
import torch

import horovod.torch as hvd
import replica_warnings
from horovod import _core
from horovod.common import _replicas
from horovod.common.exceptions import ReplicasDifferError
from replica_warnings import begin_again, check_named, end_failed

found = replica_warnings.found

BOTH_OPTIMIZERS = pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum], ids=["mean", "Adasum"])
# A step that no job gets to, as rank 0 has all reports long before.
MANY = 1000


def is_last():
    return hvd.rank() == hvd.size() - 1


def trained(seed, steps=2, **options):
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), **options
    )
    train(model, optimizer, steps)
    return model, optimizer


def train(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()


@BOTH_OPTIMIZERS
def test_a_forgotten_broadcast_is_one_warning_of_rank_0_that_names_tensor_and_ranks(found, op):
    trained(hvd.rank(), op=op)
    ranks = ", ".join(f"rank {rank}" for rank in range(hvd.size()))
    check_named(
        found(),
        f"'bias' differs between {ranks} (no majority)",
        "2 of 2 parameters differ",
        "hvd.broadcast_parameters(model.state_dict(), root_rank=0)",
    )


def test_the_one_rank_that_differs_is_named(found):
    if hvd.size() < 3:
        pytest.skip("two ranks have no majority")
    trained(is_last())
    last = hvd.size() - 1
    check_named(found(), f"'weight' on rank {last} differs from ranks 0-{last - 1} (the majority)")


@BOTH_OPTIMIZERS
def test_equal_replicas_are_read_once_and_not_warned_of(found, op, monkeypatch):
    reported = []
    report = _core.report_replica
    monkeypatch.setattr(_core, "report_replica", lambda *a: [reported.append(a), report(*a)])
    model, optimizer = trained(7, steps=3, op=op)
    assert len(reported) == 1
    assert reported[0][2] == ["bias", "weight"]
    assert found() == []
    # In a new generation a rank may be new.
    train(model, optimizer, 2)
    assert len(reported) == 2
    assert found() == []


def test_a_rank_that_joins_before_its_first_step_is_not_blamed_nor_are_later_models(found):
    model, optimizer = trained(7, steps=0)
    if not is_last():
        train(model, optimizer, 2)
    root = hvd.join()
    hvd.broadcast_parameters(model.state_dict(), root_rank=root)
    train(model, optimizer, 2)
    # A second model, of which each rank reports parameters.
    trained(8)
    assert found() == []


def test_a_broadcast_before_the_first_step_is_enough(found):
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    train(model, optimizer, 2)
    assert found() == []


def test_buffers_and_frozen_parameters_may_differ(found):
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
    model.register_buffer("noise", torch.full((4,), float(hvd.rank())))
    with torch.no_grad():
        model[0].weight.add_(hvd.rank())
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    train(model, optimizer, 2)
    assert found() == []


def test_process_sets_are_compared_among_their_members_only(found):
    sets = [hvd.ProcessSet([0]), hvd.ProcessSet(list(range(1, hvd.size())))]
    begin_again(process_sets=sets)
    mine = min(hvd.rank(), 1)
    trained(mine, process_set=sets[mine])
    assert found() == []
    begin_again(process_sets=sets)
    trained(hvd.rank(), process_set=sets[mine])
    lines = found()
    if hvd.size() > 2:
        check_named(lines, "The ranks of process set 2 do", "root_rank=1, process_set=...)")
    else:
        assert lines == []


def test_a_rank_that_has_joined_is_not_waited_for(found):
    if not is_last():
        trained(hvd.rank())
    hvd.join()
    assert found() == []


def test_as_an_error_it_ends_the_job_of_every_rank(found, monkeypatch):
    monkeypatch.setenv("HOROVOD_CHECK_REPLICAS", "error")
    begin_again()
    with pytest.raises(ReplicasDifferError, match=r"'bias' .*broadcast_parameters"):
        trained(hvd.rank(), steps=MANY)
    monkeypatch.delenv("HOROVOD_CHECK_REPLICAS")
    end_failed()


def test_switched_off_nothing_is_read(found, monkeypatch):
    monkeypatch.setenv("HOROVOD_CHECK_REPLICAS", "off")
    begin_again()
    monkeypatch.setattr(_core, "report_replica", None)
    trained(hvd.rank())
    monkeypatch.undo()
    assert found() == []


@pytest.mark.parametrize("at", [0, -1])
def test_of_large_models_the_ends_of_each_parameter_are_compared(found, monkeypatch, at):
    monkeypatch.setattr(_replicas, "_WHOLE_BYTES_MAX", 16)
    monkeypatch.setattr(_replicas, "_BLOCK_BYTES", 8)
    torch.manual_seed(7)
    model = torch.nn.Linear(9, 2)
    with torch.no_grad():
        model.weight.view(-1)[9] += hvd.rank()  # in the middle
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    train_wide = torch.ones(1, 9)
    for _ in range(2):
        optimizer.zero_grad()
        model(train_wide).sum().backward()
        optimizer.step()
    assert found() == []
    with torch.no_grad():
        model.weight.view(-1)[at] += hvd.rank()
    optimizer.zero_grad()
    model(train_wide).sum().backward()
    optimizer.step()
    check_named(found(), "'weight'", "1 of 2 parameters differ")
