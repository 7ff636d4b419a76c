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
    """Commits the state every `batches_per_commit` batches, and at the end of each epoch.

    The callbacks that keep `state.batch` and `state.epoch` may come before or after it.
    """

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__(_keras.backend, state, batches_per_commit)


class UpdateBatchStateCallback(_impl.UpdateBatchStateCallbackImpl, _keras.callbacks.Callback):
    """Keeps `state.batch`, the number of batches of the epoch that are done, and 0 between epochs.

    When `fit` begins with `state.batch` above 0, its first epoch is as many batches shorter. For that `fit` has to know
    the number of steps of an epoch; which samples come is the data set's affair, which may read `state.batch`.
    """

    def __init__(self, state: Any) -> None:
        super().__init__(_keras.backend, state)


class UpdateEpochStateCallback(_impl.UpdateEpochStateCallbackImpl, _keras.callbacks.Callback):
    """Keeps `state.epoch`, the number of epochs that are done."""

    def __init__(self, state: Any) -> None:
        super().__init__(_keras.backend, state)
