"""Finds gradients that a script changed after `backward()` had left them to a later reduction.

A step before `backward_passes_per_step` passes reduces the gradients that are there. Clipping or unscaling before that
reduction would use this rank's own gradients. The ranks would then differ, without an error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

try:
    from torch.amp.grad_scaler import GradScaler, OptState
except ImportError:  # before PyTorch 2.3
    from torch.cuda.amp.grad_scaler import GradScaler, OptState  # type: ignore[assignment,attr-defined]

from horovod.torch._gradient_entries import GradientEntry


class Mark(NamedTuple):
    """A gradient as a backward pass left it."""

    identity: int
    versions: tuple[int, ...]
    address: int

    def differs(self, now: Mark, *, in_flight: bool) -> bool:
        """Whether the script has changed it. The core itself refuses a tensor in flight that got other memory."""
        if in_flight:
            return (now.identity, now.versions) != (self.identity, self.versions)
        return (now.versions, now.address) != (self.versions, self.address)


class LeftGradients:
    """Gradients that are not reduced yet, as backward passes left them."""

    def __init__(self) -> None:
        self._marks: dict[GradientEntry, Mark] = {}

    def note(self, entries: Iterable[GradientEntry]) -> None:
        """Remember how these are now."""
        for entry in entries:
            mark = _mark(entry.param.grad)
            if mark is not None:
                self._marks[entry] = mark

    def forget(self, entry: GradientEntry) -> None:
        """Leave one out: its gradient is on its way."""
        if self._marks:
            self._marks.pop(entry, None)

    def forget_sent(self) -> None:
        """Leave out all that were sent: their results are in place."""
        for entry in [entry for entry in self._marks if entry.settled]:
            del self._marks[entry]

    def clear(self) -> None:
        """Leave all out."""
        self._marks.clear()

    def names(self) -> list[str]:
        """Return the names of all noted gradients."""
        return [entry.name for entry in self._marks]

    def changed(self, among: Callable[[GradientEntry], bool] = lambda entry: True) -> list[str]:
        """Return the names of the noted gradients that the script has changed. One that is None now does not count."""
        return [
            entry.name
            for entry, mark in self._marks.items()
            if among(entry)
            and (now := _mark(entry.param.grad)) is not None
            and mark.differs(now, in_flight=entry.settled)
        ]


def _mark(grad: torch.Tensor | None) -> Mark | None:
    """Return the tensor's identity, how often it was changed in place, and its address; None if that is not known."""
    if grad is None or grad.is_inference():
        return None
    if grad.layout is torch.strided:
        return Mark(id(grad), (grad._version,), grad.data_ptr())
    if grad.layout is torch.sparse_coo:
        values = grad._values()
        return Mark(id(grad), (grad._version, values._version), values.data_ptr())
    return None


def is_unscaled_by_caller(optimizer: torch.optim.Optimizer, depth: int) -> bool:
    """Whether the frame `depth` above is a GradScaler's that has unscaled the optimizer's gradients before.

    `unscale_` does not count as a change in place, and the scaler calls nothing of the optimizer.
    """
    scaler = sys._getframe(depth + 1).f_locals.get("self")
    if not isinstance(scaler, GradScaler):
        return False
    state = scaler._per_optimizer_states.get(id(optimizer), {})
    return state.get("stage") is OptState.UNSCALED
