"""Waits that end when it is proven that the others wait for what this rank does after them."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from horovod import _core


class SoftWait:
    """Waits for the operations of one user, such as an optimizer, and prints a warning once if that was in vain."""

    __slots__ = ("_has_warned",)

    def __init__(self) -> None:
        self._has_warned = False

    def have_ended(self, handles: list[int], explain: Callable[[int, str], str]) -> bool:
        """Wait for these operations; `False`: the others wait for what comes after.

        `explain` makes the warning of the rank that waits, and of the operation for which it does.
        """
        waits = _core.wait_softly(handles)
        if waits is None:
            return True
        if not self._has_warned:
            self._has_warned = True
            # The stack is that of the framework: no line of it is to blame.
            warnings.warn(explain(*waits), stacklevel=2)
        return False
