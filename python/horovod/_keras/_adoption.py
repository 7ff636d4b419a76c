"""Wraps optimizers whose configuration may be incomplete: those with classes or learning-rate schedules of a script."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

_OF_KERAS = ("keras", "tf_keras")

_given: WeakSet[Any] = WeakSet()
"""Optimizers that share their attributes with a distributed one."""


def is_set_by_config(optimizer: Any) -> bool:
    """Return whether the configuration of this optimizer is enough to make an equal one.

    A class that is not Keras's own may need other arguments than those in the configuration, or have more state. A
    schedule that is not Keras's own may have no configuration.
    """
    return all(
        kind.__module__.partition(".")[0] in _OF_KERAS
        for kind in (type(optimizer), *map(type, _rates(optimizer)))
    )


def _rates(optimizer: Any) -> Iterator[Any]:
    """Yield the schedules of the learning rate, and of other hyperparameters of legacy optimizers."""
    own = vars(optimizer)
    for value in (own.get("_learning_rate"), *own.get("_hyper", {}).values()):
        if callable(value) and not hasattr(value, "assign"):  # variables are callable too
            yield value


def adopted(kind: Any, optimizer: Any) -> Any:
    """Return an object of class `kind`, a subclass of the optimizer's class, that shares the optimizer's attributes.

    No constructor runs. Steps and momentum continue. The given optimizer must not be used any more.

    Raises
    ------
    ValueError
        The optimizer was passed before: both results would count each other's steps.
    """
    if optimizer in _given:
        raise ValueError(
            f"This {type(optimizer).__name__} was wrapped before, and the distributed optimizer shares its steps and "
            "momentum. Use that one, or make a new optimizer."
        )
    _given.add(optimizer)
    made = kind.__new__(kind)
    vars(made).update(vars(optimizer))
    made._hvd_begin()
    return made
