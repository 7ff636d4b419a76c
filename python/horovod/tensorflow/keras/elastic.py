"""Elastic training with `tf.keras`: `hvd.elastic`."""

from typing import Any

import tensorflow as tf

from horovod._keras import elastic as _impl
from horovod._keras.elastic import KerasState, run

# Keras 3, or Keras 2 with TF_USE_LEGACY_KERAS=1.
_keras: Any = tf.keras

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


class CommitStateCallback(_impl.CommitStateCallbackImpl, _keras.callbacks.Callback):
    __doc__ = _impl.CommitStateCallbackImpl.__doc__


class UpdateBatchStateCallback(_impl.UpdateBatchStateCallbackImpl, _keras.callbacks.Callback):
    __doc__ = _impl.UpdateBatchStateCallbackImpl.__doc__


class UpdateEpochStateCallback(_impl.UpdateEpochStateCallbackImpl, _keras.callbacks.Callback):
    __doc__ = _impl.UpdateEpochStateCallbackImpl.__doc__
