"""Checks the splits of alltoall: how many rows of a tensor go to each rank."""

from collections.abc import Mapping, Set
from operator import index
from typing import Any


def checked_splits(splits: Any) -> list[int] | None:
    """Return alltoall's rows for each rank, or None if there are none.

    `splits` is a sequence of integers, or has a method `tolist` that returns one.

    Raises
    ------
    ValueError
        `splits` is something else, or has a negative number.
    """
    try:
        if isinstance(splits, Mapping | Set):
            raise TypeError("it has no order of ranks")
        rows = [_count(n) for n in (splits.tolist() if hasattr(splits, "tolist") else splits)]
    except TypeError:
        raise ValueError(
            f"alltoall expects a 1D list of integers as splits, not {splits!r:.200}."
        ) from None
    if any(n < 0 for n in rows):
        raise ValueError(f"alltoall expects splits that are not negative, not {rows}.")
    return rows or None


def _count(number: Any) -> int:
    if isinstance(number, bool):
        raise TypeError("a truth value is no number of rows")
    return index(number)
