"""Code that runs as it is written while `tf.function` traces: AutoGraph would rewrite it, slowly and for nothing."""

from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

_F = TypeVar("_F", bound=Callable[..., Any])


def unconverted(function: _F) -> _F:
    """Decorate a function that uses no Python conditions or loops on tensors; what it calls is not rewritten either."""
    marked: _F = tf.autograph.experimental.do_not_convert(function)
    return marked
