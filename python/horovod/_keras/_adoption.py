"""Wrapping optimizers that their configuration does not tell: classes and learning-rate schedules of a script."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

_OF_KERAS = ("keras", "tf_keras")

_given: WeakSet[Any] = WeakSet()
"""Optimizers that share what they hold with a distributed one."""


def is_set_by_config(optimizer: Any) -> bool:
    """Whether an optimizer made from the configuration of this one is like it.

    A class that is not Keras's own may take other arguments than those in the configuration, or hold more. A schedule
    that is not Keras's own may have no configuration.
    """
    return all(
        kind.__module__.partition(".")[0] in _OF_KERAS
        for kind in (type(optimizer), *map(type, _rates(optimizer)))
    )


def _rates(optimizer: Any) -> Iterator[Any]:
    """The objects that give the learning rate, and other numbers of legacy optimizers, where these are no numbers."""
    own = vars(optimizer)
    for value in (own.get("_learning_rate"), *own.get("_hyper", {}).values()):
        if callable(value) and not hasattr(value, "assign"):  # variables may be called, too
            yield value


def adopted(kind: Any, optimizer: Any) -> Any:
    """An object of this subclass of the optimizer's class that shares all that the optimizer holds.

    No constructor runs. Steps and momentum go on; the given optimizer must not be used beside it.

    Raises
    ------
    ValueError
        The optimizer was given before: both results would count each other's steps.
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
