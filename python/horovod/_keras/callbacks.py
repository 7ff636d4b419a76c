"""Callbacks of `fit` for both generations of Keras: mixins for the `Callback` class of either generation.

The callbacks read and assign variables between batches, and therefore do not depend on the backend.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

import horovod.numpy as hvd
from horovod._keras import _first_step, _variables

_NO_STEPS = (
    "Could not autodetect the number of steps per epoch. Please specify the steps_per_epoch parameter to the "
    "{} or upgrade to the latest version of Keras."
)


class CallbackImpl:
    """Base class of the callbacks in this module."""

    model: Any
    params: Any
    # Whether the callback has methods for single batches; Keras 2 queries this.
    _at_batches = False

    # With these methods, `fit` of either generation accepts an object of the other generation's class.
    def _implements_train_batch_hooks(self) -> bool:
        return self._at_batches

    def _implements_test_batch_hooks(self) -> bool:
        return False

    def _implements_predict_batch_hooks(self) -> bool:
        return False


class BroadcastGlobalVariablesCallbackImpl(CallbackImpl):
    """Broadcasts the root's weights and optimizer state after the first batch, when all variables exist.

    Parameters
    ----------
    root_rank
        Global rank whose values are used.
    device
        Accepted for older scripts, without effect.
    local_variables
        Variables of the model that are not broadcast.

    Raises
    ------
    ValueError
        An element of `local_variables` is not a variable.
    """

    _at_batches = True

    def __init__(
        self,
        root_rank: int,
        device: str = "",
        local_variables: Iterable[Any] | None = None,
    ) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.broadcast_done = False
        self._local: dict[int, Any] = {}
        _first_step.callbacks.add(self)
        for variable in local_variables or ():
            self.register_local_var(variable)

    def register_local_var(self, var: Any) -> None:
        """Exclude a variable of the model from the broadcast."""
        if not (hasattr(var, "assign") and hasattr(var, "shape")):
            raise ValueError("All local variables must be of tf.Variable type.")
        self._local[id(var)] = var

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcast after the first batch."""
        if self.broadcast_done:
            return
        # Only weights are broadcast: states of random generators (dropout) and metrics differ between ranks.
        weights = [v for v in self.model.weights if id(v) not in self._local]
        _variables.broadcast(weights, self.root_rank, "keras.model")
        optimizer = self.model.optimizer
        if optimizer is not None:
            _variables.broadcast(
                _variables.variables_of(optimizer), self.root_rank, "keras.optimizer"
            )
        self.broadcast_done = True


class MetricAverageCallbackImpl(CallbackImpl):
    """Averages the metrics over the ranks at the end of each epoch.

    Put this callback before callbacks that read metrics, such as `ReduceLROnPlateau`, `EarlyStopping` and
    `TensorBoard`. All ranks need the same metrics.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Write the averages to `logs`, which later callbacks read."""
        if logs is None:
            logs = {}
        mine = {key: _variables.to_numpy(logs[key]) for key in sorted(logs)}
        mine = {key: value for key, value in mine.items() if value.dtype.kind in "biuf"}
        everyone = hvd.allgather_object(mine, "keras.metrics")
        for rank, its in enumerate(everyone):
            if its.keys() != everyone[0].keys():
                raise ValueError(
                    f"MetricAverageCallback needs the same metrics on all ranks: rank 0 has {list(everyone[0])}, "
                    f"rank {rank} has {list(its)}. Validate on all ranks or on none, and give all the same metrics."
                )
        for key in mine:
            mean = np.mean([np.asarray(its[key], np.float64) for its in everyone], axis=0)
            logs[key] = float(mean) if mean.ndim == 0 else mean


class LearningRateScheduleCallbackImpl(CallbackImpl):
    """Sets the learning rate to the product of `initial_lr` and the multiplier of the epoch.

    Parameters
    ----------
    initial_lr
        Usually the rate for one rank times the number of ranks.
    multiplier
        A function of the epoch, which is fractional unless `staircase`; or a number, which is raised to the power of
        the epochs since `start_epoch`. A number implies `staircase`.
    start_epoch, end_epoch
        First epoch in which the callback sets the rate, and first epoch in which it does not any more.
    staircase
        Whether the rate changes only at the beginning of an epoch.
    momentum_correction
        Whether accumulated momentum is multiplied by new rate / old rate when the rate changes.
    steps_per_epoch
        Batches per epoch; default the number that `fit` provides.

    Raises
    ------
    ValueError
        `initial_lr` is None; or, in `fit`, the number of steps is unknown.
    """

    _at_batches = True

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
        super().__init__()
        if initial_lr is None:
            raise ValueError("Parameter `initial_lr` is required")
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch: int | None = None
        self._restored_momentum: float | None = None
        if callable(multiplier):
            self.multiplier: Callable[[float], float] = multiplier
        else:
            constant = multiplier
            self.staircase = True
            self.multiplier = lambda epoch: constant ** (epoch - start_epoch)

    def _autodetect_steps_per_epoch(self) -> int:
        params = self.params or {}
        if params.get("steps"):
            return int(params["steps"])
        if params.get("samples") and params.get("batch_size"):
            return int(params["samples"]) // int(params["batch_size"])
        raise ValueError(_NO_STEPS.format(type(self).__name__))

    def _adjust_learning_rate(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        before = learning_rate(optimizer)
        after = self.initial_lr * self.multiplier(epoch)
        if after == before:
            return
        optimizer.learning_rate = after
        if self.momentum_correction and before > 0:
            self._correct_momentum(optimizer, after / before)

    def _correct_momentum(self, optimizer: Any, ratio: float) -> None:
        """Scale the accumulated momentum as if it had been accumulated at the new rate."""
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        if not _has_momentum(inner):
            return
        gathered = getattr(inner, "momentums", None) or getattr(inner, "_momentums", None)
        if gathered:
            # Multiplying the accumulated values once equals multiplying the momentum for this batch. It also works
            # where the momentum is a constant of a traced function.
            for variable in gathered:
                if variable is not None:
                    variable.assign(variable * ratio)
        elif hasattr(inner, "_set_hyper"):
            self._restored_momentum = float(_variables.to_numpy(inner.momentum))
            inner.momentum = self._restored_momentum * ratio
        elif getattr(inner, "built", False):
            raise ValueError(
                f"momentum_correction does not know where {type(inner).__name__} of {type(inner).__module__} keeps its "
                "momentum. Pass momentum_correction=False, or use SGD of this version of Keras."
            )

    def on_train_begin(self, logs: Any = None) -> None:
        """Set the number of batches of an epoch, if it is needed and not given."""
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self._autodetect_steps_per_epoch()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Store the number of the epoch."""
        self.current_epoch = epoch

    def on_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the learning rate of this batch."""
        epoch = self.current_epoch or 0
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return
        if self.staircase:
            if batch == 0:
                self._adjust_learning_rate(epoch)
        else:
            self._adjust_learning_rate(epoch + float(batch) / (self.steps_per_epoch or 1))

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Restore the momentum that was corrected for one batch."""
        if self._restored_momentum is not None:
            optimizer = self.model.optimizer
            getattr(optimizer, "inner_optimizer", optimizer).momentum = self._restored_momentum
            self._restored_momentum = None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Write the learning rate to `logs`."""
        if logs is not None:
            logs["lr"] = learning_rate(self.model.optimizer)


class LearningRateWarmupCallbackImpl(LearningRateScheduleCallbackImpl):
    """Raises the learning rate from `initial_lr / size` to `initial_lr` over the first epochs, batch by batch.

    Parameters
    ----------
    initial_lr
        The rate at the end, usually the rate for one rank times the number of ranks.
    warmup_epochs
        Number of epochs until the rate is reached.
    momentum_correction, steps_per_epoch
        As in `LearningRateScheduleCallback`.
    verbose
        1: rank 0 prints a line at the end of the warm-up.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            # One batch is added, so that the last batch of the warm-up has the full rate.
            epoch += 1.0 / (self.steps_per_epoch or 1)
            size = hvd.size()
            return 1.0 / size * (epoch * (size - 1) / warmup_epochs + 1)

        super().__init__(
            initial_lr,
            multiplier,
            0,
            warmup_epochs,  # type: ignore[arg-type]
            False,
            momentum_correction,
            steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Write the learning rate to `logs`; print a line at the end of the warm-up."""
        super().on_epoch_end(epoch, logs)
        if self.end_epoch is not None and epoch == self.end_epoch - 1 and self.verbose > 0:
            reached = learning_rate(self.model.optimizer)
            if hvd.rank() == 0:
                sys.stdout.write(
                    f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {reached:g}.\n"
                )
                sys.stdout.flush()


class BestModelCheckpointImpl:
    """A `ModelCheckpoint` that saves the best model. Set the path as the attribute `filepath` before `fit`.

    The arguments are those of Keras's `ModelCheckpoint`.
    """

    filepath: Any

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
    ) -> None:
        options: dict[str, Any] = {
            # Keras 3 checks the suffix of the name.
            "filepath": "unset.weights.h5" if save_weights_only else "unset.keras",
            "monitor": monitor,
            "verbose": verbose,
            "save_best_only": True,
            "save_weights_only": save_weights_only,
            "mode": mode,
            "save_freq": save_freq,
        }
        super().__init__(**options)
        self.filepath = None


def learning_rate(optimizer: Any) -> float:
    """Return the current learning rate of an optimizer of any generation."""
    return float(_variables.to_numpy(optimizer.learning_rate))


def _has_momentum(optimizer: Any) -> bool:
    try:
        momentum = optimizer.momentum
    except AttributeError:
        return False
    return bool(_variables.to_numpy(momentum) != 0)
