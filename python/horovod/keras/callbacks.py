"""Callbacks for `fit` with Keras 3: weights that begin alike, averaged metrics, learning rates.

They also work with models of Keras 2 (`tf_keras`).
"""

import keras

from horovod._keras import callbacks as _impl

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class BroadcastGlobalVariablesCallback(
    _impl.BroadcastGlobalVariablesCallbackImpl, keras.callbacks.Callback
):
    __doc__ = _impl.BroadcastGlobalVariablesCallbackImpl.__doc__


class MetricAverageCallback(_impl.MetricAverageCallbackImpl, keras.callbacks.Callback):
    __doc__ = _impl.MetricAverageCallbackImpl.__doc__


class LearningRateScheduleCallback(
    _impl.LearningRateScheduleCallbackImpl, keras.callbacks.Callback
):
    __doc__ = _impl.LearningRateScheduleCallbackImpl.__doc__


class LearningRateWarmupCallback(_impl.LearningRateWarmupCallbackImpl, keras.callbacks.Callback):
    __doc__ = _impl.LearningRateWarmupCallbackImpl.__doc__


class BestModelCheckpoint(_impl.BestModelCheckpointImpl, keras.callbacks.ModelCheckpoint):
    __doc__ = _impl.BestModelCheckpointImpl.__doc__

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: str | int = "epoch",
    ) -> None:
        super().__init__(monitor, verbose, False, mode, save_freq)
