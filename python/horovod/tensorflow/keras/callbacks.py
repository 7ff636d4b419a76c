"""Callbacks for `fit` with `tf.keras`: weights that begin alike, averaged metrics, learning rates.

`tf.keras` is Keras 3, or with TF_USE_LEGACY_KERAS=1 Keras 2; they work with models of both.
"""

from collections.abc import Callable, Iterable
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
    """Gives all ranks the root's weights and optimizer state after the first batch, when all variables exist.

    Parameters
    ----------
    root_rank
        Global rank whose values are used.
    device
        Accepted for older scripts.
    local_variables
        Variables of the model that each rank keeps.

    Raises
    ------
    ValueError
        A local variable is none.
    """

    def __init__(
        self, root_rank: int, device: str = "", local_variables: Iterable[Any] | None = None
    ) -> None:
        super().__init__(_keras.backend, root_rank, device, local_variables)


class MetricAverageCallback(_impl.MetricAverageCallbackImpl, _keras.callbacks.Callback):
    """Averages the metrics over the ranks at the end of each epoch.

    Put it before callbacks that read metrics, such as `ReduceLROnPlateau`, `EarlyStopping` and `TensorBoard`. All ranks
    need the same metrics.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__(_keras.backend, device)


class LearningRateScheduleCallback(
    _impl.LearningRateScheduleCallbackImpl, _keras.callbacks.Callback
):
    """Sets the learning rate to `initial_lr` times what `multiplier` gives for the epoch.

    Parameters
    ----------
    initial_lr
        Usually the rate for one rank times the number of ranks.
    multiplier
        A function of the epoch, which is fractional unless `staircase`; or a number, which is raised to the power of
        the epochs since `start_epoch`.
    start_epoch, end_epoch
        It acts from the one until before the other.
    staircase
        Whether the rate changes once per epoch only.
    momentum_correction
        Whether gathered momentum is scaled by new over old rate when the rate changes.
    steps_per_epoch
        Batches per epoch, if `fit` does not know.

    Raises
    ------
    ValueError
        No `initial_lr`; or, in `fit`, no number of steps.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__(
            _keras.backend,
            initial_lr,
            multiplier,
            start_epoch,
            end_epoch,
            staircase,
            momentum_correction,
            steps_per_epoch,
        )


class LearningRateWarmupCallback(_impl.LearningRateWarmupCallbackImpl, _keras.callbacks.Callback):
    """Raises the learning rate from `initial_lr / size` to `initial_lr` over the first epochs, batch by batch.

    Parameters
    ----------
    initial_lr
        The rate at the end, usually that for one rank times the number of ranks.
    warmup_epochs
        How many epochs it takes.
    momentum_correction, steps_per_epoch
        As of `LearningRateScheduleCallback`.
    verbose
        1: rank 0 says when it has ended.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(
            _keras.backend, initial_lr, warmup_epochs, momentum_correction, steps_per_epoch, verbose
        )


class BestModelCheckpoint(_keras.callbacks.ModelCheckpoint):
    """A `ModelCheckpoint` that keeps the best model, at a path that is set later, as attribute `filepath`."""

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
    ) -> None:
        super().__init__(
            filepath="unset.weights.h5" if save_weights_only else "unset.keras",
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        self.filepath = None
