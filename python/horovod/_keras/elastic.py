"""Elastic training with `fit`, for both generations of Keras: the state of a model, and callbacks that commit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from horovod._keras import _variables
from horovod._keras._failures import as_horovod_error
from horovod._keras.callbacks import CallbackImpl
from horovod.common._gradient_sums import forget_gradients
from horovod.common._snapshot import MayWait
from horovod.common._state_handlers import HandledState, HandlerRegistry, SnapshotHandler
from horovod.common.elastic import State
from horovod.common.elastic import run as _run

_S = TypeVar("_S", bound=State)
_P = ParamSpec("_P")
_T = TypeVar("_T")


class _EpochEnds:
    """The value of `model.stop_training` that ends an epoch only."""

    def __bool__(self) -> bool:
        return True


_EPOCH_ENDS = _EpochEnds()


class _ArrayCopies:
    """Copies of arrays that were copied from variables already."""

    def copy(self, value: Any, reused: Any, name: str, may_wait: MayWait) -> tuple[Any, None]:
        del reused, name, may_wait
        return value, None


class _VariablesHandler(SnapshotHandler):
    """Of objects that hold variables."""

    copies = _ArrayCopies()
    prefix = ""

    def variables(self) -> list[Any]:
        """Variables to save and restore."""
        raise NotImplementedError

    def shared(self) -> list[Any]:
        """Variables that are equal on all ranks."""
        return self.variables()

    def state(self) -> list[Any]:
        """The values of the variables."""
        return [_variables.value_of(variable) for variable in self.variables()]

    def load(self, state: Any) -> None:
        """Assign them; variables that came later keep theirs."""
        for variable, value in zip(self.variables(), state, strict=False):
            _variables.assign(variable, value)

    def sync(self) -> None:
        """Give all ranks the root's values."""
        _variables.broadcast(self.shared(), self.root_rank, f"elastic.{self.prefix}")


class ModelHandler(_VariablesHandler):
    """Of a model of Keras."""

    prefix = "model"

    def variables(self) -> list[Any]:
        """All but those of metrics, which begin anew with each epoch."""
        _variables.attach_state(self.value)
        metrics = {id(variable) for variable in getattr(self.value, "metrics_variables", ())}
        return [variable for variable in self.value.variables if id(variable) not in metrics]

    def shared(self) -> list[Any]:
        """The weights: random numbers (dropout) stay each rank's own."""
        return list(self.value.weights)


class OptimizerHandler(_VariablesHandler):
    """Of an optimizer of Keras."""

    prefix = "optimizer"

    def variables(self) -> list[Any]:
        """All of them."""
        return _variables.variables_of(self.value)

    def load(self, state: Any) -> None:
        """Assign the values, and forget gradients that were added up since."""
        super().load(state)
        self.reset()

    def sync(self) -> None:
        """Give all ranks the root's values; sums of gradients begin anew on all."""
        super().sync()
        self.reset()

    def reset(self) -> None:
        """Forget sums of gradients: of ranks that are gone, or that newcomers do not have."""
        forget_gradients(self.value)


class _KerasHandlers(HandlerRegistry):
    """Told by what values can do: classes of both generations may be alive."""

    def handler_of(self, value: Any) -> Any:
        if hasattr(value, "trainable_weights") and hasattr(value, "fit"):
            return ModelHandler(value)
        if hasattr(value, "learning_rate") and hasattr(value, "apply_gradients"):
            return OptimizerHandler(value)
        return super().handler_of(value)


class KerasState(HandledState):
    """State of a training with Keras, on any backend.

    Snapshots are copies in host memory.

    Parameters
    ----------
    model
        Built, so that it has variables.
    optimizer
        By default the model's.
    kwargs
        Names and initial values of attributes, such as `epoch=0, batch=0`; anything that can be copied and pickled.

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
    """Make an optimizer's variables: all ranks must have them when they sync."""
    if optimizer is None or getattr(optimizer, "built", True) or not hasattr(optimizer, "build"):
        return
    optimizer.build(model.trainable_variables)


class CommitStateCallbackImpl(CallbackImpl):
    """Commits the state every `batches_per_commit` batches, and at the end of each epoch.

    The callbacks that keep `state.batch` and `state.epoch` may come before or after it.
    """

    _at_batches = True

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        """Begin to count."""
        self.batches_remaining = self.batches_per_commit

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commit, if it is time."""
        self.batches_remaining -= 1
        callbacks = _progress_of(self.state)
        # After the last batch of an epoch the commit at its end follows: one in between would have a batch to resume
        # from of which nothing is left.
        if self.batches_remaining > 0 or any(progress.ends_epoch(batch) for progress in callbacks):
            return
        # Whichever comes first in the list of callbacks: what is committed counts this batch.
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
    """Notes in the state how far training has come."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def on_train_begin(self, logs: Any = None) -> None:
        """Be the one that is told before a commit."""
        its: Any = _progress_of(self.state)
        its[:] = [other for other in its if type(other) is not type(self)] + [self]

    def note_batch(self, batch: int) -> None:
        """A batch, counted from the beginning of this call of `fit`'s epoch, is done."""

    def note_epoch(self, epoch: int) -> None:
        """An epoch is done."""

    def ends_epoch(self, batch: int) -> bool:
        """Whether this is known to be an epoch's last batch."""
        return False


class UpdateBatchStateCallbackImpl(_ProgressImpl):
    """Keeps `state.batch`, the number of batches of the epoch that are done, and 0 between epochs.

    When `fit` begins with `state.batch` above 0, its first epoch is as many batches shorter. For that `fit` has to know
    the number of steps of an epoch; which samples come is the data set's affair, which may read `state.batch`.
    """

    _at_batches = True

    def __init__(self, state: Any) -> None:
        super().__init__(state)
        self._done_before = 0
        self._last: int | None = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Find out how many batches are left."""
        self._done_before = int(self.state.batch)
        steps = int((self.params or {}).get("steps") or 0)
        self._last = max(steps - self._done_before, 1) - 1 if steps else None

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count, and end the epoch after what was left of it."""
        self.note_batch(batch)
        is_short = self._done_before > 0 and self.ends_epoch(batch)
        if is_short and not self.model.stop_training:
            self.model.stop_training = _EPOCH_ENDS

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Begin to count anew."""
        self.note_epoch(epoch)
        # A request of another callback has set another value meanwhile.
        if self.model.stop_training is _EPOCH_ENDS:
            self.model.stop_training = False

    def note_batch(self, batch: int) -> None:
        """A batch of this `fit`'s epoch is done."""
        self.state.batch = self._done_before + batch + 1

    def note_epoch(self, epoch: int) -> None:
        """An epoch is done."""
        self.state.batch = 0

    def ends_epoch(self, batch: int) -> bool:
        """Whether this is known to be the epoch's last batch."""
        return self._last is not None and batch >= self._last


class UpdateEpochStateCallbackImpl(_ProgressImpl):
    """Keeps `state.epoch`, the number of epochs that are done."""

    def __init__(self, state: Any) -> None:
        super().__init__(state)
        self.initial_epoch = state.epoch
        self._first: int | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Note from where this call of `fit` goes on."""
        super().on_train_begin(logs)
        self.initial_epoch = self.state.epoch
        self._first = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note the number of `fit`'s first epoch, which is 0 or its `initial_epoch`."""
        if self._first is None:
            self._first = epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Count."""
        self.note_epoch(epoch)

    def note_epoch(self, epoch: int) -> None:
        """An epoch is done."""
        self.state.epoch = self.initial_epoch + (epoch - (self._first or 0)) + 1


def _progress_of(state: Any) -> list[Any]:
    """The callbacks that keep the progress of a state."""
    found: list[Any] | None = state.__dict__.get("_keras_progress")
    if found is None:
        found = []
        object.__setattr__(state, "_keras_progress", found)
    return found


def run(func: Callable[Concatenate[_S, _P], _T]) -> Callable[Concatenate[_S, _P], _T]:
    """Decorate the training function `func(state, ...)`: it is called again whenever the job's members change.

    As in `horovod.common.elastic.run`; failures of collective operations that the backend has wrapped into exceptions
    of its own count as what they are.
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
