"""Which errors of TensorFlow mean that a collective operation failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

from horovod.common.exceptions import HorovodInternalError, HorovodStalledError

# Statuses that our kernels end with, but for that of arguments without meaning; XLA says Internal for all.
_STATUSES = (
    tf.errors.UnknownError,
    tf.errors.FailedPreconditionError,
    tf.errors.AbortedError,
    tf.errors.InternalError,
)


@contextmanager
def as_horovod_errors() -> Iterator[None]:
    """Raise HorovodInternalError in place of TensorFlow's error when one of our operations failed."""
    try:
        yield
    except _STATUSES as error:
        text = str(error.message)
        if not is_ours(text):
            raise
        kind = HorovodStalledError if is_standstill(text) else HorovodInternalError
        raise kind(text) from error


def is_ours(text: str) -> bool:
    """Whether the text of an error names one of our operations, or is the core's."""
    return "Horovod" in text


def is_standstill(text: str) -> bool:
    """Whether the ranks wait for each other for ever."""
    return "wait for each other" in text
