"""Elastic training with Keras 3: `hvd.elastic`."""

import keras

from horovod._keras import elastic as _impl
from horovod._keras.elastic import KerasState, run

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


class CommitStateCallback(_impl.CommitStateCallbackImpl, keras.callbacks.Callback):
    __doc__ = _impl.CommitStateCallbackImpl.__doc__


class UpdateBatchStateCallback(_impl.UpdateBatchStateCallbackImpl, keras.callbacks.Callback):
    __doc__ = _impl.UpdateBatchStateCallbackImpl.__doc__


class UpdateEpochStateCallback(_impl.UpdateEpochStateCallbackImpl, keras.callbacks.Callback):
    __doc__ = _impl.UpdateEpochStateCallbackImpl.__doc__
