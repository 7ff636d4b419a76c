"""Checks values that a framework converts to a narrower type, and integers whose sum or product may wrap."""

import warnings
from typing import Any

import numpy as np

from horovod.common._ops import Product, Sum
from horovod.common._reduction import Reduction

Array = np.ndarray[Any, Any]


class PrecisionWarning(UserWarning):
    """A value was rounded to the widest type that the framework uses."""


def is_plain_number(value: Any) -> bool:
    """Whether the value is a number of Python, to which a framework gives its default type."""
    return type(value) in (bool, int, float, complex)


def check_kept(wide: Array, kept: Array, *, is_plain: bool, cure: str) -> None:
    """Compare values with their conversion to a framework's type.

    Parameters
    ----------
    wide, kept
        The values, and the same in the narrower type.
    is_plain
        Whether the operand was a plain number, which everybody expects to be rounded to the framework's type.
    cure
        The end of the message: a sentence that tells the user how to keep the values.

    Raises
    ------
    OverflowError
        A number does not fit: an integer has changed, or a finite number has become infinite.
    """
    if wide.dtype == kept.dtype or wide.dtype.kind not in "iufc":
        return
    back = kept.astype(wide.dtype)
    changed = (
        (back != wide) & ~(np.isnan(wide) & np.isnan(back)) if wide.size else np.zeros(0, bool)
    )
    if not changed.any():
        return
    is_exact = wide.dtype.kind in "iu"
    lost = changed if is_exact else np.isfinite(wide) & ~np.isfinite(kept)
    if lost.any():
        raise OverflowError(
            f"{wide[lost].flat[0]!r} of type {wide.dtype} does not fit into {kept.dtype}. {cure}"
        )
    if not is_plain:
        warnings.warn(
            f"horovod: a value of type {wide.dtype} is rounded to {kept.dtype}. {cure}",
            PrecisionWarning,
            stacklevel=2,
        )


def python_integers(value: Any) -> Array | None:
    """Return a Python integer, or a list of such, maybe nested, as an array; None for anything else."""
    return np.asarray(value) if _is_of_integers(value) else None


def _is_of_integers(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(map(_is_of_integers, value))
    return type(value) is int


def check_room(values: Array, reduction: Reduction, dtype: Any = None) -> None:
    """Check integers of this rank before a sum or product, which wraps in silence.

    The type of the operation is `dtype`, or that of the values. Values of an array with that type need no check: the
    caller has chosen the type.

    Raises
    ------
    OverflowError
        The result of ranks that all have such a value does not fit into the type. Nothing was sent.
    """
    op, prescale, postscale, process_set = reduction
    dtype = values.dtype if dtype is None else dtype
    if op not in (Sum, Product) or values.dtype.kind not in "iu" or not values.size:
        return
    size = process_set.size() or 1
    largest = max(-int(values.min()), int(values.max()))
    result = largest * size if op == Sum else largest**size
    limit = int(np.iinfo(dtype).max)
    if result > limit or (
        prescale * postscale != 1.0 and result * abs(prescale * postscale) > limit
    ):
        kind = "sum" if op == Sum else "product"
        raise OverflowError(
            f"{largest} is too large: the {kind} of {size} such integers does not fit into {dtype}. "
            "Pass floating-point numbers, or an array of horovod.numpy whose type may wrap."
        )
