"""A list of an optimizer's variables that scripts can use as a property or as a method."""

from __future__ import annotations

from typing import Any


class CallableList(list[Any]):
    """A list whose call returns the list, for `optimizer.variables` and `optimizer.variables()`."""

    def __call__(self) -> CallableList:
        """Return the list itself."""
        return self
