"""Raises failures of a jitted training step in the call of the step.

JAX reports a failure only when a result is read, and Keras calls further steps before it reads results. Steps on failed
results never end. When Keras converts logs, it treats an exception as a value that is not a number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from horovod._keras._failures import as_horovod_error
from horovod._keras._first_step import marks

_MARK = "_hvd_looks_at_results"


def watch_results(keras: Any) -> None:
    """Make `fit` wait for each step of models with a distributed optimizer; further calls have no effect."""
    trainer: Any = next(kind for kind in keras.Model.__mro__ if "make_train_function" in vars(kind))
    if hasattr(trainer, _MARK):
        return
    setattr(trainer, _MARK, True)
    make = trainer.make_train_function

    def make_train_function(self: Any, force: bool = False) -> None:
        make(self, force)
        step = self.train_function
        if hasattr(type(self.optimizer), "_hvd") and not hasattr(step, _MARK):
            self.train_function = _looking(self, step)

    trainer.make_train_function = make_train_function


def _looking(model: Any, step: Callable[..., Any]) -> Callable[..., Any]:
    def train_function(state: Any, iterator: Any) -> Any:
        try:
            return jax.block_until_ready(step(state, iterator))  # type: ignore[no-untyped-call,unused-ignore]
        except Exception as error:
            failure = as_horovod_error(error)
            if failure is None:
                raise
            # The arrays were donated to the step. Attaching them to the model now would raise another error.
            model._jax_state = None
            raise failure from error

    train_function.__dict__.update(marks(step), **{_MARK: True})
    return train_function
