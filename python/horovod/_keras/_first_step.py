"""Reports a model's trainable weights before the second batch of `fit`. Callbacks broadcast after the first batch."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from horovod._keras import _variables
from horovod._keras._failures import as_horovod_error
from horovod.common import _replicas
from horovod.common._dtypes import CODES
from horovod.common.exceptions import ReplicasDifferError

_MARK = "_hvd_reports"
_ADVICE = "Give hvd.callbacks.BroadcastGlobalVariablesCallback({}) to fit."


class KeepsVariables(Protocol):
    """A callback that does not broadcast some variables, whose values differ between ranks."""

    _local: dict[int, Any]


# All callbacks with such variables.
callbacks: weakref.WeakSet[KeepsVariables] = weakref.WeakSet()


def report_first_steps(optimizer: Any) -> None:
    """Make `fit` report the weights of all models of the optimizer's Keras generation; further calls have no effect."""
    roots = (kind.__module__.partition(".")[0] for kind in type(optimizer).__mro__)
    modules: list[Any] = [sys.modules[root] for root in roots if root in ("keras", "tf_keras")]
    for model in (module.Model for module in modules[:1]):
        trainer = next((k for k in model.__mro__ if "make_train_function" in vars(k)), None)
        if trainer is not None and _MARK not in vars(trainer):
            setattr(trainer, _MARK, True)
            _watch(trainer)


def _watch(trainer: Any) -> None:
    make = trainer.make_train_function

    def make_train_function(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = make(self, *args, **kwargs)
        step = self.train_function
        if step is not None and hasattr(type(self.optimizer), "_hvd") and not hasattr(step, _MARK):
            self.train_function = _reporting(self, step)
        return made if made is None else self.train_function

    trainer.make_train_function = make_train_function


def _reporting(model: Any, step: Callable[..., Any]) -> Callable[..., Any]:
    optimizer = model.optimizer
    # The report follows one call, which has several steps with `steps_per_execution`.
    first = _replicas.FirstStep(type(optimizer)._hvd.process_set, after=1)
    # A weak reference, because the model references the function.
    reference = weakref.ref(model)

    def train_function(*given: Any) -> Any:
        if first.is_due() and (trained := reference()) is not None:
            _report(trained, given)
        try:
            return step(*given)
        except Exception as error:
            failure = as_horovod_error(error)
            if isinstance(failure, ReplicasDifferError) and failure is not error:
                raise failure from error
            raise

    train_function.__dict__.update(marks(step), **{_MARK: True})
    return train_function


def marks(step: Any) -> dict[str, Any]:
    """Return the attributes that this package has set on a training function."""
    own = getattr(step, "__dict__", {})
    return {key: value for key, value in own.items() if key.startswith("_hvd_")}


def _report(model: Any, given: Sequence[Any]) -> None:
    optimizer = model.optimizer
    kept = {key for callback in list(callbacks) for key in callback._local}
    variables = list(model.trainable_variables)
    values = variables
    # On JAX the arguments are the state, whose first part are the trainable values, and the data.
    if len(given) == 2:
        values = list(given[0][0])
    # A custom training function may have another state.
    if [tuple(v.shape) for v in variables] != [tuple(value.shape) for value in values]:
        return
    named = [
        (_variables.name_of(variable), value)
        for variable, value in zip(variables, values, strict=True)
        if id(variable) not in kept and not _is_local(optimizer, variable)
        if _type_of(value) in CODES
    ]
    process_set = type(optimizer)._hvd.process_set
    root = (process_set.ranks or [0])[0]
    _replicas.report(named, _Readable(), process_set, _ADVICE.format(root))


def _is_local(optimizer: Any, variable: Any) -> bool:
    """Return whether the gradients of a variable are excluded from the reduction."""
    inner = getattr(optimizer, "inner_optimizer", None)
    if "_hvd_local" in vars(optimizer):  # of Keras 2
        local: set[Any] = vars(optimizer)["_hvd_local"]
        return variable.ref() in local
    if type(optimizer)._hvd.is_local(variable):
        return True
    return inner is not None and hasattr(type(inner), "_hvd") and _is_local(inner, variable)


def _type_of(tensor: Any) -> str:
    return str(getattr(tensor.dtype, "name", tensor.dtype))


class _Readable:
    """Reads variables of any generation and backend, and arrays of JAX."""

    def shape_of(self, tensor: Any) -> _replicas.Shape:
        name = _type_of(tensor)
        width = 2 if name == "bfloat16" else np.dtype(name).itemsize
        return name, tuple(tensor.shape), width

    def checksum(self, tensor: Any, parts: Sequence[slice]) -> int:
        if len(parts) == 1:
            return _replicas.checksum_of([_variables.to_numpy(tensor)])
        flat = _variables.flat(tensor)
        return _replicas.checksum_of([_variables.to_numpy(flat[part]) for part in parts])
