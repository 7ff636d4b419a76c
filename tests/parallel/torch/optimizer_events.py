"""The events of a script between two steps, named by `test_optimizer_table.py`. Each acts on one of two trainings."""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from optimizer_support import assert_ranks_agree, mine

import horovod.torch as hvd


class World:
    """One of the two trainings: a model, its optimizer, and the ranks whose backward passes it runs."""

    def __init__(self, row, model, ranks, is_oracle):
        self.row, self.model, self.ranks, self.is_oracle = row, model, ranks, is_oracle
        self.original = self.optimizer = row.make(row.params(model))
        self.divisor = 1 if row.options.get("op") == hvd.Sum or not is_oracle else len(ranks)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
        self.step = 0
        self.kept: Any = None
        """A value that one event passes to a later one."""

    def distribute(self, options):
        """Wrap the optimizer."""
        names = self.model.named_parameters() if self.row.named else None
        with self.row.wrapping():
            self.optimizer = hvd.DistributedOptimizer(self.original, names, **options)
        if not self.row.wait:
            assert self.optimizer.wait_in_backward
            self.optimizer.wait_in_backward = False

    def loss(self, rank, number=0):
        """Of the rows that a rank has in the batch of this number."""
        x, y = self.row.batch(self.model, 10 * self.step + number)
        return self.row.loss(
            self.model, mine(x, rank), mine(y, rank), self.row.use(self, number, rank)
        )


Event = Callable[[World], object]


# ---- the events -----------------------------------------------------------------------------------------------------


def backward(number=0, factor=1.0, times=lambda rank: 1):
    """Backward passes over the batch of this number; `times` returns how many a rank runs."""

    def event(world):
        for rank in world.ranks:
            for _ in range(times(rank)):
                share = world.loss(rank, number) * factor / world.divisor
                if world.is_oracle:  # what its hooks do on a rank
                    share = share * (rank + 1) ** world.row.hooks
                share.backward()

    return event


first, second, third = backward(0), backward(1), backward(2)
half_first, half_second = backward(0, 0.5), backward(1, 0.5)
thrown_away, twice_second = backward(0, 5.0), backward(1, 2.0)
twice_on_rank_0 = backward(times=lambda rank: 2 if rank == 0 else 1)
three_times_on_rank_0 = backward(times=lambda rank: 3 if rank == 0 else 1)


def zero(world):
    world.optimizer.zero_grad()


def zero_in_place(world):
    world.optimizer.zero_grad(set_to_none=False)


def zero_model(world):
    world.model.zero_grad()


def zero_model_in_place(world):
    world.model.zero_grad(set_to_none=False)


def step(world):
    if world.is_oracle and world.row.fills_missing_gradients():
        for p in world.model.parameters():
            if p.grad is None and p.requires_grad:
                p.grad = torch.zeros_like(p)
    world.optimizer.step()


def clip(world):
    torch.nn.utils.clip_grad_norm_(world.model.parameters(), 0.05)


def by_ranks(act):
    """An event of the distributed training alone."""
    return lambda world: None if world.is_oracle else act(world)


@by_ranks
def synchronize(world):
    world.optimizer.synchronize()


def inside(method, event):
    """An event inside a context manager of the distributed optimizer."""

    def act(world):
        with contextlib.nullcontext() if world.is_oracle else getattr(world.optimizer, method)():
            event(world)

    return act


only_step = inside("skip_synchronize", step)
unsynced_first = inside("no_sync", first)


@partial(inside, "skip_synchronize")
def all_in_skip_synchronize(world):
    for event in (zero, first, synchronize, clip, only_step):
        event(world)


def freeze_first(world):
    world.model[0].requires_grad_(False)


def freeze_second(world):
    world.model[1].requires_grad_(False)


def freeze_last(world):
    world.model[3].requires_grad_(False)


def thaw_first_later(world):
    if world.step == 1:
        world.model[0].requires_grad_(True)


def add_group(world, to="optimizer"):
    """Fine-tuning: a layer thaws and joins the optimizer, or the one that was wrapped."""
    if world.step == 1:
        world.model[3].requires_grad_(True)
        getattr(world, to).add_param_group({"params": world.model[3].parameters(), "lr": 0.05})


add_group_to_original = partial(add_group, to="original")


def cast(world):
    world.model.double()


def rewrite_rate(world):
    for group in world.optimizer.param_groups:
        group["lr"] = 0.01 / (world.step + 1)


@by_ranks
def set_one_pass(world):
    world.optimizer.set_backward_passes_per_step(1)
    assert world.optimizer.backward_passes_per_step == 1


@by_ranks
def gradients_are_channels_last(world):
    assert world.model[0].weight.grad.is_contiguous(memory_format=torch.channels_last)


@by_ranks
def table_is_sparse(world):
    assert world.model.table.weight.grad.is_sparse


@by_ranks
def gradients_agree(world):
    assert_ranks_agree(torch.nn.ParameterList(p.grad for p in world.model.parameters()))


@by_ranks
def other_collective(world):
    assert torch.isfinite(hvd.allreduce(world.loss(hvd.rank()).detach(), name="avg_loss"))


@by_ranks
def autograd_grad(world):
    """`torch.autograd.grad` does not change the gradients of the parameters."""
    before = [p.grad.clone() for p in world.model.parameters()]
    torch.autograd.grad(world.loss(hvd.rank()), list(world.model.parameters()))
    for p, grad in zip(world.model.parameters(), before, strict=True):
        assert torch.equal(p.grad, grad)


class Breaks(torch.autograd.Function):
    """Raises in backward, as when memory runs out."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise MemoryError("out of memory")


@by_ranks
def failing_backward(world):
    x, y = world.row.batch(world.model, 0)
    out = world.model[1:](Breaks.apply(world.model[0](mine(x))))
    with pytest.raises(MemoryError):
        (out - mine(y)).pow(2).sum().backward()


@by_ranks
def hook_of_the_user(world):
    """Changes a gradient by what this rank alone knows, as local clipping does."""

    def change(p):
        p.grad.mul_(hvd.rank() + 1)

    for p in world.model.parameters():
        p.register_post_accumulate_grad_hook(change)


def ascend(world):
    """Sharpness-aware minimisation: to where the gradient is taken."""
    world.kept = [0.05 * p.grad / p.grad.norm() for p in world.model.parameters()]
    with torch.no_grad():
        for p, move in zip(world.model.parameters(), world.kept, strict=True):
            p.add_(move)


def descend(world):
    with torch.no_grad():
        for p, move in zip(world.model.parameters(), world.kept, strict=True):
            p.sub_(move)


def scaled(world, overflows=False):
    """A backward pass of a scaled loss."""
    for rank in world.ranks:
        loss = world.loss(rank) / world.divisor
        if overflows and (world.step, rank) == (1, hvd.size() - 1):
            loss = loss * float("inf")
        world.scaler.scale(loss).backward()


overflowing = partial(scaled, overflows=True)


def unscale(world):
    world.scaler.unscale_(world.optimizer)


def scaler_step(world):
    world.scaler.step(world.optimizer)
    world.scaler.update()


only_scaler_step = inside("skip_synchronize", scaler_step)
