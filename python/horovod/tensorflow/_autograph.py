"""Excludes functions from AutoGraph, whose conversion in `tf.function` is slow and has no effect for them."""

from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

_F = TypeVar("_F", bound=Callable[..., Any])


def unconverted(function: _F) -> _F:
    """Exclude a function, and the functions that it calls, from AutoGraph's conversion.

    The function must not use Python conditions or loops on tensors.
    """
    marked: _F = tf.autograph.experimental.do_not_convert(function)
    return marked
