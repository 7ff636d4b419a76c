"""Finds gradients that a script changed after `backward()` had left them to a later reduction.

A step before `backward_passes_per_step` passes reduces what is there. Clipping or unscaling before it would go by this
rank's own gradients, and the ranks would go on with other values each, without a word.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler, OptState

from horovod.torch._gradient_entries import GradientEntry

Mark = tuple[Any, ...]


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

    def changed(self) -> list[str]:
        """Return the names of those that the script has changed since; dropped ones do not count."""
        return [
            entry.name
            for entry, mark in self._marks.items()
            if (now := _mark(entry.param.grad)) is not None and now != mark
        ]


def _mark(grad: torch.Tensor | None) -> Mark | None:
    """Return where a gradient lies and how often it was changed in place; None if that cannot be told."""
    if grad is None or grad.is_inference():
        return None
    if grad.layout is torch.strided:
        return grad.data_ptr(), grad._version
    if grad.layout is torch.sparse_coo:
        values = grad._values()
        return values.data_ptr(), grad._version, values._version
    return None


def is_unscaled_by_caller(optimizer: torch.optim.Optimizer, depth: int) -> bool:
    """Whether the frame `depth` above is a GradScaler's that has unscaled the optimizer's gradients before.

    `unscale_` does not count as a change in place, and the scaler tells the optimizer nothing of it.
    """
    scaler = sys._getframe(depth + 1).f_locals.get("self")
    if not isinstance(scaler, GradScaler):
        return False
    state = scaler._per_optimizer_states.get(id(optimizer), {})
    return state.get("stage") is OptState.UNSCALED
