"""Recognises errors of TensorFlow that report a failed collective operation."""

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

# Statuses of our kernels' errors, except for invalid arguments. In compiled programs every error is Internal.
_STATUSES = (
    tf.errors.UnknownError,
    tf.errors.FailedPreconditionError,
    tf.errors.AbortedError,
    tf.errors.DataLossError,
    tf.errors.InternalError,
)


# Parts of error texts: our kernels name the failed operation, or the tensor about which the ranks disagree.
_OURS = ("Horovod", "(tensor tensorflow.")


@contextmanager
def as_horovod_errors() -> Iterator[None]:
    """Raise a Horovod error in place of TensorFlow's error if one of our operations failed in the block.

    The error is `ReplicasDifferError`, `HorovodStalledError`, or otherwise `HorovodInternalError`.
    """
    try:
        yield
    except _STATUSES as error:
        text = str(error.message)
        if not any(mark in text for mark in _OURS):
            raise
        if isinstance(error, tf.errors.DataLossError):
            # TensorFlow uses this status also for damaged files.
            if not is_difference(text):
                raise
            raise ReplicasDifferError(text) from error
        # The kernels use this status if ranks wait for each other forever.
        is_stall = isinstance(error, tf.errors.AbortedError)
        raise (HorovodStalledError if is_stall else HorovodInternalError)(text) from error
