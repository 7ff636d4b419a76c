"""Optimizers' lists of variables, which scripts of different ages read or call."""

from __future__ import annotations

from typing import Any


class CallableList(list[Any]):
    """A list that may also be called, which gives the list: `optimizer.variables` and `optimizer.variables()`."""

    def __call__(self) -> CallableList:
        """The list itself."""
        return self
