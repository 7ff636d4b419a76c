"""Failures of a jitted training step, raised where it is called: Keras on JAX goes on without having looked at results.

JAX tells of a failure only to who looks at a result. Keras converts logs, and takes an exception there for a value that
is no number; further steps on results that failed never end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from horovod._keras._failures import as_horovod_error
from horovod._keras._first_step import marks

_MARK = "_hvd_looks_at_results"


def watch_results(keras: Any) -> None:
    """Have `fit` wait for each step of a model whose optimizer is distributed."""
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
            # The step was given the arrays for good; who attached them now would get an error about that.
            model._jax_state = None
            raise failure from error

    train_function.__dict__.update(marks(step), **{_MARK: True})
    return train_function
