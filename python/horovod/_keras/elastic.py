"""Elastic training with `fit` for both generations of Keras: the state of a model, and callbacks that commit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from horovod._keras import _variables
from horovod._keras._failures import as_horovod_error
from horovod._keras.callbacks import CallbackImpl
from horovod.common._gradient_sums import forget_gradients
from horovod.common._snapshot import MayWait
from horovod.common._state_handlers import (
    HandledState,
    HandlerRegistry,
    SnapshotHandler,
    refuse_other_shapes,
)
from horovod.common.elastic import State
from horovod.common.elastic import run as _run

_S = TypeVar("_S", bound=State)
_P = ParamSpec("_P")
_T = TypeVar("_T")


class _EpochEnds:
    """Value of `model.stop_training` that ends only the epoch."""

    def __bool__(self) -> bool:
        return True


_EPOCH_ENDS = _EpochEnds()


class _ArrayCopies:
    """Copies nothing, because the arrays are copies of the variables."""

    def copy(self, value: Any, reused: Any, name: str, may_wait: MayWait) -> tuple[Any, None]:
        del reused, name, may_wait
        return value, None


class _VariablesHandler(SnapshotHandler):
    """Saves, restores and syncs an object with variables."""

    copies = _ArrayCopies()
    prefix = ""

    def variables(self) -> list[Any]:
        """Return the variables that are saved and restored."""
        raise NotImplementedError

    def shared(self) -> list[Any]:
        """Return the variables that are synced, and therefore equal on all ranks."""
        return self.variables()

    def state(self) -> list[Any]:
        """Return copies of the values of the variables."""
        return [_variables.value_of(variable) for variable in self.variables()]

    def load(self, state: Any) -> None:
        """Assign the saved values; variables that were made after the save are unchanged."""
        for variable, value in zip(self.variables(), state, strict=False):
            _variables.assign(variable, value)

    def refuse_others(self, state: Any) -> None:
        """Raise ValueError for other numbers or shapes of variables, of which `load` would take the first ones."""
        refuse_other_shapes(state, self.state())

    def sync(self) -> None:
        """Broadcast the root's values to all ranks."""
        _variables.broadcast(self.shared(), self.root_rank, f"elastic.{self.prefix}")


class ModelHandler(_VariablesHandler):
    """Saves, restores and syncs a Keras model."""

    prefix = "model"

    def variables(self) -> list[Any]:
        """Return all variables except those of metrics, which are reset in each epoch."""
        _variables.attach_state(self.value)
        metrics = {id(variable) for variable in getattr(self.value, "metrics_variables", ())}
        return [variable for variable in self.value.variables if id(variable) not in metrics]

    def shared(self) -> list[Any]:
        """Return the weights; states of random generators (dropout) differ between ranks."""
        return list(self.value.weights)


class OptimizerHandler(_VariablesHandler):
    """Saves, restores and syncs a Keras optimizer."""

    prefix = "optimizer"

    def variables(self) -> list[Any]:
        """Return all variables of the optimizer."""
        return _variables.variables_of(self.value)

    def load(self, state: Any) -> None:
        """Assign the saved values, and clear the sums of gradients."""
        super().load(state)
        self.reset()

    def sync(self) -> None:
        """Broadcast the root's values to all ranks, and clear the sums of gradients."""
        super().sync()
        self.reset()

    def reset(self) -> None:
        """Clear the sums of gradients: they may include lost ranks, and new ranks do not have them."""
        forget_gradients(self.value)


class _KerasHandlers(HandlerRegistry):
    """Chooses handlers by the methods of a value, because values may be of either generation of Keras."""

    def handler_of(self, value: Any) -> Any:
        if hasattr(value, "trainable_weights") and hasattr(value, "fit"):
            return ModelHandler(value)
        if hasattr(value, "learning_rate") and hasattr(value, "apply_gradients"):
            return OptimizerHandler(value)
        return super().handler_of(value)


class KerasState(HandledState):
    """State of training with Keras on any backend.

    Snapshots are copies in host memory.

    Parameters
    ----------
    model
        A model that is built, so that it has variables.
    optimizer
        Default: the model's optimizer.
    kwargs
        Names and initial values of attributes, such as `epoch=0, batch=0`. Values must support copying and pickling.

    Raises
    ------
    ValueError
        The model is not built.

    Examples
    --------
    >>> state = hvd.elastic.KerasState(model, batch=0, epoch=0)
    """

    _handler_registry = _KerasHandlers([])

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if not model.built:
            raise ValueError("Model must be built first. Run `model.build(input_shape)`.")
        optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
        _build(optimizer, model)
        self._keras_progress: list[Any] = []
        values = {"model": model} if optimizer is None else {"model": model, "optimizer": optimizer}
        super().__init__(**values, **kwargs)


def _build(optimizer: Any, model: Any) -> None:
    """Make the optimizer create its variables, because all ranks must have them before a sync."""
    if optimizer is None or getattr(optimizer, "built", True) or not hasattr(optimizer, "build"):
        return
    optimizer.build(model.trainable_variables)


class CommitStateCallbackImpl(CallbackImpl):
    """Commits the state every `batches_per_commit` batches, and at the end of each epoch.

    The callbacks that update `state.batch` and `state.epoch` may precede or follow this callback in the list.
    """

    _at_batches = True

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        """Reset the count of batches until the next commit."""
        self.batches_remaining = self.batches_per_commit

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commit after every `batches_per_commit` batches."""
        self.batches_remaining -= 1
        callbacks = _progress_of(self.state)
        # No commit after the last batch of an epoch: `on_epoch_end` commits next. A state committed here would resume
        # in an epoch without remaining batches.
        if self.batches_remaining > 0 or any(progress.ends_epoch(batch) for progress in callbacks):
            return
        # The committed state includes this batch, regardless of the order of callbacks.
        for progress in callbacks:
            progress.note_batch(batch)
        self._commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commit."""
        for progress in _progress_of(self.state):
            progress.note_epoch(epoch)
        self._commit()

    def _commit(self) -> None:
        self.batches_remaining = self.batches_per_commit
        _variables.attach_state(self.model)
        self.state.commit()


class _ProgressImpl(CallbackImpl):
    """Base class of the callbacks that update the progress of training in the state."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def on_train_begin(self, logs: Any = None) -> None:
        """Register this callback with the state, in place of an earlier one of its class, for calls before a commit."""
        its: Any = _progress_of(self.state)
        its[:] = [other for other in its if type(other) is not type(self)] + [self]

    def note_batch(self, batch: int) -> None:
        """Update the state after a batch, whose number counts from the beginning of the epoch in this call of `fit`."""

    def note_epoch(self, epoch: int) -> None:
        """Update the state after an epoch."""

    def ends_epoch(self, batch: int) -> bool:
        """Return whether this is the last batch of an epoch; False if that is unknown."""
        return False


class UpdateBatchStateCallbackImpl(_ProgressImpl):
    """Updates `state.batch`: the number of completed batches of the epoch, and 0 between epochs.

    If `state.batch` is above 0 when `fit` begins, the first epoch is shorter by that number of batches. This requires
    a data set of known length or `steps_per_epoch`. The data set chooses the samples, and may read `state.batch`.
    """

    _at_batches = True

    def __init__(self, state: Any) -> None:
        super().__init__(state)
        self._done_before = 0
        self._last: int | None = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Compute the last batch of the epoch from the batches that are left."""
        self._done_before = int(self.state.batch)
        steps = int((self.params or {}).get("steps") or 0)
        self._last = max(steps - self._done_before, 1) - 1 if steps else None

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Update the state, and end a shortened epoch after its last batch."""
        self.note_batch(batch)
        is_short = self._done_before > 0 and self.ends_epoch(batch)
        if is_short and not self.model.stop_training:
            self.model.stop_training = _EPOCH_ENDS

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Set `state.batch` to 0, and cancel the request that ended a shortened epoch."""
        self.note_epoch(epoch)
        # If another callback has requested a stop, `stop_training` has another value.
        if self.model.stop_training is _EPOCH_ENDS:
            self.model.stop_training = False

    def note_batch(self, batch: int) -> None:
        """Set `state.batch` to the number of completed batches."""
        self.state.batch = self._done_before + batch + 1

    def note_epoch(self, epoch: int) -> None:
        """Set `state.batch` to 0."""
        self.state.batch = 0

    def ends_epoch(self, batch: int) -> bool:
        """Return whether this is the last batch of the epoch; False if the number of steps is unknown."""
        return self._last is not None and batch >= self._last


class UpdateEpochStateCallbackImpl(_ProgressImpl):
    """Updates `state.epoch`, the number of completed epochs."""

    def __init__(self, state: Any) -> None:
        super().__init__(state)
        self.initial_epoch = state.epoch
        self._first: int | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Store the number of epochs that are completed before this call of `fit`."""
        super().on_train_begin(logs)
        self.initial_epoch = self.state.epoch
        self._first = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Store the number of the first epoch of `fit`, which is 0 or its argument `initial_epoch`."""
        if self._first is None:
            self._first = epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Update `state.epoch`."""
        self.note_epoch(epoch)

    def note_epoch(self, epoch: int) -> None:
        """Set `state.epoch` to the number of completed epochs."""
        self.state.epoch = self.initial_epoch + (epoch - (self._first or 0)) + 1


def _progress_of(state: Any) -> list[Any]:
    """Return the list of callbacks that update the progress of a state; it can be changed."""
    found: list[Any] | None = state.__dict__.get("_keras_progress")
    if found is None:
        found = []
        object.__setattr__(state, "_keras_progress", found)
    return found


def run(func: Callable[Concatenate[_S, _P], _T]) -> Callable[Concatenate[_S, _P], _T]:
    """Decorate the training function `func(state, ...)` so that it is called again when the job's members change.

    See `horovod.common.elastic.run`. Exceptions in which a backend wraps failures of collective operations are
    converted to Horovod's exceptions.
    """

    @functools.wraps(func)
    def wrapped(state: _S, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return func(state, *args, **kwargs)
        except Exception as error:
            failure = as_horovod_error(error)
            if failure is None or failure is error:
                raise
            raise failure from error

    return _run(wrapped)  # type: ignore[arg-type]
