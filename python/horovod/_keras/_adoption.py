"""Wrapping optimizers that their configuration does not tell: classes and learning-rate schedules of a script."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_OF_KERAS = ("keras", "tf_keras")


def is_told_by_config(optimizer: Any) -> bool:
    """Whether an optimizer made from the configuration of this one is like it.

    A class of a script may take other arguments than those in the configuration, or hold more; a schedule of a script
    may have no configuration.
    """
    return all(
        kind.__module__.partition(".")[0] in _OF_KERAS
        for kind in (type(optimizer), *map(type, _rates(optimizer)))
    )


def _rates(optimizer: Any) -> Iterator[Any]:
    """What gives the learning rate, and other numbers of legacy optimizers, if it is no number."""
    own = vars(optimizer)
    for value in (own.get("_learning_rate"), *own.get("_hyper", {}).values()):
        if callable(value) and not hasattr(value, "assign"):  # variables may be called, too
            yield value


def adopted(kind: Any, optimizer: Any) -> Any:
    """An object of this subclass of the optimizer's class that shares all that the optimizer holds.

    No constructor runs. Steps and momentum go on; the given optimizer must not be used beside it.
    """
    made = kind.__new__(kind)
    vars(made).update(vars(optimizer))
    made._hvd_begin()
    return made
