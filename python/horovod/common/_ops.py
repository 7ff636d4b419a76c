"""Reduction operators: their codes, and how the older `average` argument maps to them."""

import warnings
from numbers import Integral
from typing import Final

Average: Final = 0
"""The sum over the members, divided by their number."""
Sum: Final = 1
"""The sum over the members."""
Adasum: Final = 2
"""The adaptive sum: gradients that point the same way are averaged, orthogonal ones are added."""
Min: Final = 3
"""The least value of the members, for each element."""
Max: Final = 4
"""The greatest value of the members, for each element."""
Product: Final = 5
"""The product over the members."""

_BY_NAME: Final = {
    "average": Average,
    "sum": Sum,
    "adasum": Adasum,
    "min": Min,
    "max": Max,
    "product": Product,
}


def _code(op: object) -> int:
    """The code of an operator that is no plain `int`."""
    if isinstance(op, str) and op.lower() in _BY_NAME:
        return _BY_NAME[op.lower()]
    if isinstance(op, Integral):
        return int(op)
    # Also operators of other libraries, whose numbers mean something else.
    raise ValueError(
        f"op={op!r} is not an operator of Horovod: expected hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max or "
        "hvd.Product, or such a name as a string."
    )


def resolve_op(op: int | str | None, average: bool | None) -> int:
    """Return the operator that `op` and the deprecated `average` ask for; `Average` if neither is given.

    Raises
    ------
    ValueError
        Both are given, or `op` is none of the operators and no name of one.
    """
    if op is not None:
        if average is not None:
            raise ValueError(
                "The op parameter supersedes average. Please provide only one of them."
            )
        return op if type(op) is int else _code(op)
    if average is None:
        return Average
    warnings.warn(
        "Parameter `average` has been replaced with `op` and will be removed in a future version; "
        "use op=Average or op=Sum.",
        DeprecationWarning,
        stacklevel=3,
    )
    return Average if average else Sum
