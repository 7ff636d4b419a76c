"""How `test_optimizer_table.py` trains: a world per training, what a script does in it, and what a row is."""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from optimizer_support import assert_ranks_agree, batches, mine, mse, small_model

import horovod.torch as hvd


class World:
    """One of the two trainings: a model, its optimizer, and the ranks whose backward passes it runs."""

    def __init__(self, row, model, ranks, is_oracle):
        self.row, self.model, self.ranks, self.is_oracle = row, model, ranks, is_oracle
        self.original = self.optimizer = row.make(row.params(model))
        self.divisor = 1 if row.options.get("op") == hvd.Sum else len(ranks)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
        self.step = 0
        self.kept: Any = None
        """What an event leaves for a later one."""

    def distribute(self, options):
        """Wrap the optimizer."""
        names = self.model.named_parameters() if self.row.named else None
        with self.row.wrapping():
            self.optimizer = hvd.DistributedOptimizer(self.original, names, **options)
        assert self.optimizer.wait_in_backward
        self.optimizer.wait_in_backward = self.row.wait

    def loss(self, rank, number=0):
        """Of the rows that a rank has in the batch of this number."""
        x, y = self.row.batch(self.model, 10 * self.step + number)
        return self.row.loss(
            self.model, mine(x, rank), mine(y, rank), self.row.use(self, number, rank)
        )


Event = Callable[[World], object]


# ---- what a script does --------------------------------------------------------------------------------------------


def backward(number=0, factor=1.0, times=lambda rank: 1):
    """A backward pass over the batch of this number, or as many as `times` says."""

    def event(world):
        for rank in world.ranks:
            for _ in range(times(rank)):
                share = (
                    world.loss(rank, number) * factor / (world.divisor if world.is_oracle else 1)
                )
                if world.is_oracle:
                    share = share * world.row.local_factor(rank)
                share.backward()

    return event


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
    """Something that the oracle does not need."""
    return lambda world: None if world.is_oracle else act(world)


@by_ranks
def synchronize(world):
    world.optimizer.synchronize()


def without_synchronizing(event):
    def act(world):
        skipping = (
            contextlib.nullcontext() if world.is_oracle else world.optimizer.skip_synchronize()
        )
        with skipping:
            event(world)

    return act


def without_sync(event):
    def act(world):
        with contextlib.nullcontext() if world.is_oracle else world.optimizer.no_sync():
            event(world)

    return act


def at(number, event):
    """Something that happens at one step only."""
    return lambda world: event(world) if world.step == number else None


def freeze(*layers, thaw=False):
    def event(world):
        for layer in layers:
            world.model[layer].requires_grad_(thaw)

    return event


def add_group(to):
    """Fine-tuning: a layer thaws and joins the optimizer, or the one that was wrapped."""

    def event(world):
        world.model[3].requires_grad_(True)
        getattr(world, to).add_param_group({"params": world.model[3].parameters(), "lr": 0.05})

    return event


def rewrite_rate(world):
    for group in world.optimizer.param_groups:
        group["lr"] = 0.01 / (world.step + 1)


@by_ranks
def set_one_pass(world):
    world.optimizer.set_backward_passes_per_step(1)
    assert world.optimizer.backward_passes_per_step == 1


@by_ranks
def gradients_agree(world):
    assert_ranks_agree(torch.nn.ParameterList(p.grad for p in world.model.parameters()))


@by_ranks
def other_collective(world):
    assert torch.isfinite(hvd.allreduce(world.loss(hvd.rank()).detach(), name="avg_loss"))


@by_ranks
def autograd_grad(world):
    """Does not touch gradients that are there."""
    before = [p.grad.clone() for p in world.model.parameters()]
    torch.autograd.grad(world.loss(hvd.rank()), list(world.model.parameters()))
    for p, grad in zip(world.model.parameters(), before, strict=True):
        assert torch.equal(p.grad, grad)


class Breaks(torch.autograd.Function):
    """Where memory runs out."""

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


def scaled_backward(overflow=lambda step, rank: False):
    def event(world):
        for rank in world.ranks:
            loss = world.loss(rank) / (world.divisor if world.is_oracle else 1)
            if overflow(world.step, rank):
                loss = loss * float("inf")
            world.scaler.scale(loss).backward()

    return event


def unscale(world):
    world.scaler.unscale_(world.optimizer)


def scaler_step(world):
    world.scaler.step(world.optimizer)
    world.scaler.update()


# ---- a row ----------------------------------------------------------------------------------------------------------


def make_sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01)


def make_adam(params):
    return torch.optim.Adam(params, lr=0.01)


def usual_batch(model, seed):
    ((x, y),) = batches(1, dtype=next(model.parameters()).dtype, seed=seed)
    return x, y


def usual_loss(model, x, y, use):
    return mse(model, x, y)


USUAL = (zero, backward(), step)


@dataclass(frozen=True)
class Row:
    """What both trainings do, and how near they have to be to each other."""

    name: str
    events: Sequence[Event] = USUAL
    """Of each step."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of DistributedOptimizer; a process set by the ranks in it."""
    model: Callable[[], torch.nn.Module] = small_model
    make: Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer] = make_sgd
    params: Callable[[torch.nn.Module], Iterable[torch.Tensor]] = lambda model: model.parameters()
    named: bool = True
    batch: Callable[[torch.nn.Module, int], tuple[torch.Tensor, torch.Tensor]] = usual_batch
    loss: Callable[..., torch.Tensor] = usual_loss
    use: Callable[[World, int, int], Any] = lambda world, number, rank: None
    """What a rank uses of the model in a pass."""
    before: Sequence[Event] = ()
    """Before the optimizer is wrapped."""
    after: Sequence[Event] = ()
    local_factor: Callable[[int], float] = lambda rank: 1.0
    """What hooks multiply a rank's gradients with, for the oracle."""
    wrapping: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    wait: bool = True
    patches: Sequence[tuple[str, Any]] = ()
    steps: int = 3
    tolerance: float = 1e-12

    def fills_missing_gradients(self) -> bool:
        """Whether parameters that no rank uses get zeros, on which weight decay acts."""
        return hvd.size() > 1 and self.options.get("zero_missing_gradients", True)


def each(name, variants, **common):
    """One row per variant, which is fields of a row by a word for them."""
    for word, fields in variants.items():
        merged = {**common, **fields}
        merged["options"] = {**common.get("options", {}), **fields.get("options", {})}
        yield Row(f"{name}, {word}" if word else name, **merged)


def over(field, *values):
    """Variants that differ in one field."""
    return {f"{field}={value}": {field: value} for value in values}


def with_options(*variants):
    """Variants that differ in options of DistributedOptimizer."""
    return {_words(options): {"options": options} for options in variants}


def times(*factors):
    """All combinations of variants."""
    combined: dict[str, dict[str, Any]] = {"": {}}
    for variants in factors:
        combined = {
            " ".join(filter(None, (left, right))): {
                **a,
                **b,
                "options": {**a.get("options", {}), **b.get("options", {})},
            }
            for left, a in combined.items()
            for right, b in variants.items()
        }
    return combined


OP_NAMES = {hvd.Average: "Average", hvd.Sum: "Sum"}


def _words(options):
    shown = {
        name: OP_NAMES[value] if name == "op" else getattr(value, "__name__", value)
        for name, value in options.items()
    }
    return " ".join(f"{name}={value}" for name, value in shown.items()) or "defaults"
