"""Which errors of TensorFlow mean that a collective operation failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

from horovod.common._replicas import is_difference
from horovod.common.exceptions import (
    HorovodInternalError,
    HorovodStalledError,
    ReplicasDifferError,
)

# Statuses that our kernels end with, but for that of arguments without meaning; XLA says Internal for all.
_STATUSES = (
    tf.errors.UnknownError,
    tf.errors.FailedPreconditionError,
    tf.errors.AbortedError,
    tf.errors.DataLossError,
    tf.errors.InternalError,
)


# Kernels whose operation failed on all ranks name it, or the tensor upon which the ranks disagree.
_OURS = ("Horovod", "(tensor tensorflow.")


@contextmanager
def as_horovod_errors() -> Iterator[None]:
    """Raise HorovodInternalError in place of TensorFlow's error when one of our operations failed."""
    try:
        yield
    except _STATUSES as error:
        text = str(error.message)
        if not any(mark in text for mark in _OURS):
            raise
        if isinstance(error, tf.errors.DataLossError):
            # TensorFlow says the same of a file that is damaged.
            if not is_difference(text):
                raise
            raise ReplicasDifferError(text) from error
        # Ranks that wait for each other for ever are told so by this status.
        is_stall = isinstance(error, tf.errors.AbortedError)
        raise (HorovodStalledError if is_stall else HorovodInternalError)(text) from error
