"""Waits in `backward()`, which end when it is proven that the others wait for what this rank does after it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from horovod import _core


class SoftWait:
    """Waits for the gradients of one optimizer, and says once if that was in vain."""

    __slots__ = ("_has_warned",)

    def __init__(self) -> None:
        self._has_warned = False

    def have_ended(self, handles: list[int], names: Sequence[str]) -> bool:
        """Wait for these operations; `False`: the others wait for what comes after `backward()`."""
        waits = _core.wait_softly(handles)
        if waits is None:
            return True
        if not self._has_warned:
            self._has_warned = True
            # The stack is that of the backward pass: no line of it is to blame.
            warnings.warn(_not_reduced(names, *waits), stacklevel=2)
        return False


def _not_reduced(names: Sequence[str], rank: int, operation: str) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"backward() returned before the gradients of {names[0]!r}{more} were reduced: rank {rank} waits for "
        f"{operation}, which this rank has not called yet. They will be reduced in optimizer.synchronize() or "
        "step(); do not read or change them before, so call synchronize() before clipping, and step() under "
        "skip_synchronize() then. Where every rank makes the same calls in the same order, backward() returns with "
        "reduced gradients; with optimizer.wait_in_backward = False it never waits. This is said once."
    )
