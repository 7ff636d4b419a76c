"""Finds gradients that a script changed between `backward()` and a later reduction.

A step before `backward_passes_per_step` passes reduces the gradients accumulated so far. Clipping or unscaling before
that reduction would use this rank's own gradients. The ranks would then differ, without an error.
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
    """Identity, versions and address of a gradient at the end of a backward pass."""

    identity: int
    versions: tuple[int, ...]
    address: int

    def differs(self, now: Mark, *, in_flight: bool) -> bool:
        """Return whether the script has changed the gradient since.

        The address of a gradient in flight is not compared: the core refuses a tensor whose memory was replaced.
        """
        if in_flight:
            return (now.identity, now.versions) != (self.identity, self.versions)
        return (now.versions, now.address) != (self.versions, self.address)


class LeftGradients:
    """Marks of gradients that are not reduced yet, taken at the end of backward passes."""

    def __init__(self) -> None:
        self._marks: dict[GradientEntry, Mark] = {}

    def note(self, entries: Iterable[GradientEntry]) -> None:
        """Store a mark of the current gradient of each entry."""
        for entry in entries:
            mark = _mark(entry.param.grad)
            if mark is not None:
                self._marks[entry] = mark

    def forget(self, entry: GradientEntry) -> None:
        """Delete the mark of an entry, whose gradient is being sent or was removed."""
        if self._marks:
            self._marks.pop(entry, None)

    def forget_sent(self) -> None:
        """Delete the marks of all sent gradients, whose results are written back."""
        for entry in [entry for entry in self._marks if entry.settled]:
            del self._marks[entry]

    def clear(self) -> None:
        """Delete all marks."""
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
    """Return the gradient's identity, counts of in-place changes, and address; None without a gradient or counts."""
    if grad is None or grad.is_inference():
        return None
    if grad.layout is torch.strided:
        return Mark(id(grad), (grad._version,), grad.data_ptr())
    if grad.layout is torch.sparse_coo:
        values = grad._values()
        return Mark(id(grad), (grad._version, values._version), values.data_ptr())
    return None


def is_unscaled_by_caller(optimizer: torch.optim.Optimizer, depth: int) -> bool:
    """Return whether the frame `depth` above is a GradScaler's that has unscaled the optimizer's gradients before.

    The frame is the only evidence: `unscale_` does not count as a change in place, and calls nothing of the optimizer.
    """
    scaler = sys._getframe(depth + 1).f_locals.get("self")
    if not isinstance(scaler, GradScaler):
        return False
    state = scaler._per_optimizer_states.get(id(optimizer), {})
    return state.get("stage") is OptState.UNSCALED
