"""Makes Keras 3 accept keywords of older scripts, with one warning each."""

from __future__ import annotations

import functools
import sys
import warnings
from typing import Any

from horovod._keras._generation import is_keras3

_RUN_TF_FUNCTION = "experimental_run_tf_function"
_MARK = "_hvd_takes_old_keywords"


def accept_old_keywords(keras: Any) -> None:
    """Make `compile` accept `experimental_run_tf_function`, and optimizers `lr`, in Keras 3; Keras 2 accepts both.

    The original Horovod required `experimental_run_tf_function`. The keyword has no effect.
    """
    if not is_keras3(keras) or getattr(keras.Model, _MARK, False):
        return
    setattr(keras.Model, _MARK, True)
    _accept_in_compile(keras.Model)
    _accept_in_optimizers(keras.optimizers.Optimizer)


def _accept_in_compile(model: Any) -> None:
    # The class that defines `compile` is patched: Keras does not compile a loaded model whose own class defines it.
    owner: Any = next(kind for kind in model.__mro__ if "compile" in vars(kind))
    compile_model = owner.compile

    @functools.wraps(compile_model)
    def compile_accepting(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _RUN_TF_FUNCTION in kwargs:
            del kwargs[_RUN_TF_FUNCTION]
            _note_run_tf_function()
        return compile_model(self, *args, **kwargs)

    owner.compile = compile_accepting


def _accept_in_optimizers(optimizer: Any) -> None:
    base = next(kind for kind in reversed(optimizer.__mro__) if hasattr(kind, "stateless_apply"))
    initialise = base.__init__

    @functools.wraps(initialise)
    def initialise_accepting(self: Any, *args: Any, **kwargs: Any) -> None:
        if "lr" in kwargs:
            _note_lr()
            rate = kwargs.pop("lr")
            if args:
                args = (rate, *args[1:])
            else:
                kwargs["learning_rate"] = rate
        initialise(self, *args, **kwargs)

    base.__init__ = initialise_accepting


@functools.cache
def _note_run_tf_function() -> None:
    warnings.warn(
        f"{_RUN_TF_FUNCTION} is no argument of compile() in Keras 3. It is not needed any more, and was ignored; to "
        "have all of Keras 2 back, install tf_keras and set TF_USE_LEGACY_KERAS=1.",
        stacklevel=_of_script(),
    )


@functools.cache
def _note_lr() -> None:
    warnings.warn(
        "lr= is called learning_rate= in Keras 3, and was taken as that; to have all of Keras 2 back, install tf_keras "
        "and set TF_USE_LEGACY_KERAS=1.",
        stacklevel=_of_script(),
    )


def _of_script() -> int:
    """Return the stacklevel of the script's line for a warning in the calling function, past all frames of Keras."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and _is_of_library(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    return level


def _is_of_library(module: str) -> bool:
    return module.partition(".")[0] in ("horovod", "keras")
