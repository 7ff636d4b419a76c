"""Callbacks for `fit` with `tf.keras`: weights that begin alike, averaged metrics, learning rates.

`tf.keras` is Keras 3, or with TF_USE_LEGACY_KERAS=1 Keras 2; they work with models of both.
"""

from typing import Any

import tensorflow as tf

from horovod._keras import callbacks as _impl

# Keras 3, or Keras 2 with TF_USE_LEGACY_KERAS=1.
_keras: Any = tf.keras

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class BroadcastGlobalVariablesCallback(
    _impl.BroadcastGlobalVariablesCallbackImpl, _keras.callbacks.Callback
):
    __doc__ = _impl.BroadcastGlobalVariablesCallbackImpl.__doc__


class MetricAverageCallback(_impl.MetricAverageCallbackImpl, _keras.callbacks.Callback):
    __doc__ = _impl.MetricAverageCallbackImpl.__doc__


class LearningRateScheduleCallback(
    _impl.LearningRateScheduleCallbackImpl, _keras.callbacks.Callback
):
    __doc__ = _impl.LearningRateScheduleCallbackImpl.__doc__


class LearningRateWarmupCallback(_impl.LearningRateWarmupCallbackImpl, _keras.callbacks.Callback):
    __doc__ = _impl.LearningRateWarmupCallbackImpl.__doc__


class BestModelCheckpoint(_impl.BestModelCheckpointImpl, _keras.callbacks.ModelCheckpoint):
    __doc__ = _impl.BestModelCheckpointImpl.__doc__
