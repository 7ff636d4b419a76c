"""Reduction operators: their codes, and how the older `average` argument maps to them."""

import warnings
from typing import Final

Average: Final = 0
Sum: Final = 1
Adasum: Final = 2
Min: Final = 3
Max: Final = 4
Product: Final = 5


def resolve_op(op: int | None, average: bool | None) -> int:
    """Return the operator that `op` and the deprecated `average` ask for; `Average` if neither is given.

    Raises
    ------
    ValueError
        Both are given.
    """
    if op is not None:
        if average is not None:
            raise ValueError(
                "The op parameter supersedes average. Please provide only one of them."
            )
        return op
    if average is None:
        return Average
    warnings.warn(
        "Parameter `average` has been replaced with `op` and will be removed in a future version; "
        "use op=Average or op=Sum.",
        DeprecationWarning,
        stacklevel=3,
    )
    return Average if average else Sum
