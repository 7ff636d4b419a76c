"""How many rows of a tensor alltoall sends to each rank, as a script gives them."""

from operator import index
from typing import Any


def checked_splits(splits: Any) -> list[int] | None:
    """Alltoall's rows for each rank, from any sequence of integers or one that `tolist` makes; None where it is empty.

    ValueError unless they can be that.
    """
    try:
        rows = [index(n) for n in (splits.tolist() if hasattr(splits, "tolist") else splits)]
    except TypeError:
        raise ValueError(
            f"alltoall expects a 1D list of integers as splits, not {splits!r:.200}."
        ) from None
    if any(n < 0 for n in rows):
        raise ValueError(f"alltoall expects splits that are not negative, not {rows}.")
    return rows or None
