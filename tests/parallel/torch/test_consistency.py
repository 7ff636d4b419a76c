"""The divergence watch: replicas that differ are named with tensor, ranks and step, alike on every rank."""

import logging

import pytest
import torch

import horovod.torch as hvd
from horovod.common.exceptions import ReplicasDifferError


def replica(**options):
    torch.manual_seed(5)
    model = torch.nn.Linear(3, 2)
    # Nothing moves, so what is made different stays so.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return model, hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), **options
    )


def train(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.full((1, 3), hvd.rank() + 1.0)).sum().backward()
        optimizer.step()


def begin_again(**options):
    hvd.barrier()
    hvd.shutdown()
    hvd.init(**options)


def flip_a_bit(tensor):
    if hvd.rank() == hvd.size() - 1:
        tensor.detach().view(torch.int32).view(-1)[0] ^= 1


def named(name):
    last = hvd.size() - 1
    if last == 1:
        return f"'{name}' differs between rank 0, rank 1 (no majority)"
    others = "ranks 0-1" if last == 2 else "ranks 0-2"
    return f"'{name}' on rank {last} differs from {others} (the majority)"


@pytest.fixture
def logged(caplog):
    caplog.set_level(logging.WARNING, logger="horovod")
    return lambda: [
        r.getMessage() for r in caplog.records if "do not hold the same" in r.getMessage()
    ]


both_optimizers = pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum], ids=["mean", "Adasum"])


@both_optimizers
def test_a_flipped_bit_is_named_with_tensor_ranks_and_step(op):
    if hvd.size() == 1:
        return
    model, optimizer = replica(check_consistency=2, consistency_action="error", op=op)
    train(model, optimizer, 3)
    flip_a_bit(model.weight)
    train(model, optimizer, 1)
    with pytest.raises(ReplicasDifferError) as raised:
        train(model, optimizer, 1)
    text = str(raised.value)
    assert "after step 4 of this optimizer" in text
    assert named("weight") in text
    assert "1 of 2 tensors differ" in text
    # It is said once per comparison, and the job goes on.
    train(model, optimizer, 2)
    with pytest.raises(ReplicasDifferError, match="after step 6"):
        train(model, optimizer, 1)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    train(model, optimizer, 6)


@both_optimizers
def test_a_warning_comes_once_for_each_set_of_tensors(logged, op):
    if hvd.size() == 1:
        return
    model, optimizer = replica(check_consistency=1, op=op)
    train(model, optimizer, 2)
    assert not logged()
    flip_a_bit(model.bias)
    train(model, optimizer, 5)
    assert len(logged()) == (hvd.rank() == 0)
    flip_a_bit(model.weight)
    train(model, optimizer, 3)
    assert len(logged()) == 2 * (hvd.rank() == 0)
    if hvd.rank() == 0:
        first, second = logged()
        assert named("bias") in first
        assert "weight" not in first
        assert "2 of 2 tensors differ" in second


def test_equal_replicas_raise_no_alarm_whatever_they_hold(logged):
    model, optimizer = replica(check_consistency=1, consistency_action="error")
    with torch.no_grad():
        model.weight.fill_(float("nan"))
        model.bias.fill_(float("-inf"))
    # The same elements in another order of memory are the same.
    if hvd.rank() % 2:
        model.weight.data = model.weight.data.t().contiguous().t()
    train(model, optimizer, 4)
    assert not logged()


@both_optimizers
@pytest.mark.parametrize("others", [None, 0, 1, 3])
def test_the_number_of_the_first_rank_counts(others, op):
    every = 2 if hvd.rank() == 0 else others
    model, optimizer = replica(check_consistency=every, consistency_action="error", op=op)
    train(model, optimizer, 3)
    flip_a_bit(model.weight)
    if hvd.size() == 1:
        train(model, optimizer, 5)
        return
    train(model, optimizer, 1)
    with pytest.raises(ReplicasDifferError, match="after step 4"):
        train(model, optimizer, 1)


def test_a_first_rank_that_does_not_check_turns_it_off():
    model, optimizer = replica(
        check_consistency=0 if hvd.rank() == 0 else 1, consistency_action="error"
    )
    train(model, optimizer, 2)
    flip_a_bit(model.weight)
    train(model, optimizer, 4)


def test_a_joined_rank_is_not_compared():
    model, optimizer = replica(check_consistency=1, consistency_action="error")
    train(model, optimizer, 2 if hvd.rank() == 0 else 4)
    hvd.join()


def test_ranks_that_joined_after_different_numbers_of_steps_are_compared_in_the_next_epoch():
    if hvd.size() == 1:
        return
    model, optimizer = replica(check_consistency=3, consistency_action="error")
    first = hvd.rank() == 0
    for _ in range(2):
        train(model, optimizer, 2 if first else 4)
        hvd.join()
    # The others have taken eight steps, so this is the ninth.
    flip_a_bit(model.weight)
    train(model, optimizer, 1)
    with pytest.raises(ReplicasDifferError, match="after step 9 "):
        train(model, optimizer, 1)


@pytest.mark.parametrize("between", ["hvd.join()", "nothing"])
def test_a_comparison_at_the_end_of_an_epoch_is_not_lost(between):
    model, optimizer = replica(check_consistency=3, consistency_action="error")
    train(model, optimizer, 2)
    flip_a_bit(model.weight)
    train(model, optimizer, 1)
    if between != "nothing":
        hvd.join()
    if hvd.size() > 1:
        with pytest.raises(ReplicasDifferError, match="after step 3 "):
            train(model, optimizer, 1)


def test_only_the_ranks_of_a_process_set_are_compared(logged):
    """Its first member speaks for it; what the other ranks hold and whether they train does not count."""
    if hvd.size() < 3:
        return
    other = hvd.ProcessSet(range(1, hvd.size()))
    begin_again(process_sets=[other])
    if other.included():
        every = 2 if hvd.rank() == 1 else 5
        model, optimizer = replica(check_consistency=every, process_set=other)
        train(model, optimizer, 3)
        flip_a_bit(model.weight)
        train(model, optimizer, 2)
        assert len(logged()) == (hvd.rank() == 1)
        for text in logged():
            assert "after step 4 of this optimizer: 'weight' " in text
            last = hvd.size() - 1
            sides = (
                "differs between rank 1, rank 2"
                if last == 2
                else "on rank 3 differs from ranks 1-2"
            )
            assert sides in text
        model, optimizer = replica(
            check_consistency=1, consistency_action="error", process_set=other
        )
        flip_a_bit(model.weight)
        train(model, optimizer, 1)
        with pytest.raises(ReplicasDifferError, match="after step 1 "):
            train(model, optimizer, 1)
    else:
        model, optimizer = replica(check_consistency=1, process_set=other)
        train(model, optimizer, 4)
    begin_again()


@both_optimizers
def test_a_difference_that_was_found_in_the_job_before_is_forgotten(op):
    """Only its ranks would raise it, and not those who start with the next one."""
    model, optimizer = replica(check_consistency=2, consistency_action="error", op=op)
    train(model, optimizer, 1)
    flip_a_bit(model.weight)
    train(model, optimizer, 1)
    if op == hvd.Average:
        model(torch.ones(1, 3)).sum().backward()  # here the ranks compare, and `step` would raise
    begin_again()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    if hvd.rank() == 0:
        model, optimizer = replica(check_consistency=2, consistency_action="error", op=op)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    train(model, optimizer, 1)
    flip_a_bit(model.weight)
    train(model, optimizer, 1)
    if hvd.size() > 1:
        with pytest.raises(ReplicasDifferError, match="after step 2 "):
            train(model, optimizer, 1)


def test_groups_and_several_passes_are_watched_too():
    model, optimizer = replica(
        check_consistency=1, consistency_action="error", groups=1, backward_passes_per_step=2
    )
    for step in range(3):
        if step == 1:
            flip_a_bit(model.bias)
        optimizer.zero_grad()
        for _ in range(2):
            model(torch.ones(1, 3)).sum().backward()
        if step == 2 and hvd.size() > 1:
            with pytest.raises(ReplicasDifferError, match="after step 2 "):
                optimizer.step()
        else:
            optimizer.step()


def test_wrong_arguments():
    for wrong in ({"check_consistency": -1}, {"consistency_action": "stop"}):
        with pytest.raises(ValueError, match="consistency"):
            replica(**wrong)


def test_tensors_are_compared_on_request(logged):
    norm = torch.nn.BatchNorm1d(4)
    assert hvd.check_consistency(norm.state_dict(), action="error")
    assert hvd.check_consistency([])
    norm.running_mean += hvd.rank()
    if hvd.size() == 1:
        return
    with pytest.raises(ReplicasDifferError, match="'running_mean' differs between rank 0, rank 1"):
        hvd.check_consistency(norm.named_buffers(), action="error", name="buffers")
    assert not hvd.check_consistency(norm.named_buffers(), action="warn")
    assert len(logged()) == (hvd.rank() == 0)
    assert hvd.check_consistency(norm.named_parameters(), action="error")
    with pytest.raises(ValueError, match="different tensors"):
        hvd.check_consistency({f"of rank {hvd.rank()}": torch.zeros(1)})


@both_optimizers
def test_the_settings_of_the_first_rank_count(monkeypatch, op):
    is_first = hvd.rank() == 0
    hvd.shutdown()
    monkeypatch.setenv("HOROVOD_CHECK_CONSISTENCY", "2" if is_first else "0")
    monkeypatch.setenv("HOROVOD_CONSISTENCY_ACTION", "error" if is_first else "warn")
    hvd.init()
    model, optimizer = replica(op=op)
    train(model, optimizer, 3)
    flip_a_bit(model.weight)
    train(model, optimizer, 1)
    if hvd.size() > 1:
        with pytest.raises(ReplicasDifferError, match="after step 4"):
            train(model, optimizer, 1)
    hvd.shutdown()  # the next test starts without these settings
