"""Checks values that a framework converts to a narrower type: a changed value raises or warns."""

import warnings
from typing import Any

import numpy as np

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
