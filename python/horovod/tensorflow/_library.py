"""Loads the library with TensorFlow's custom operations once; an ImportError contains the cause of a failure."""

import inspect
from pathlib import Path
from typing import Any, Final

import tensorflow as tf

# The library looks up the core's functions in this module.
from horovod import _core
from horovod.common._signals import want_handlers_to_run

_FILE: Final = Path(__file__).with_name("libhorovod_tensorflow.so")
_PROBLEM: Final = "horovod_load_problem"


def _load() -> Any:
    """Return the module of generated functions, such as `horovod_allreduce`.

    Raises
    ------
    ImportError
        The file is missing, or this TensorFlow or the core lacks a function that the library needs.
    """
    assert _core.__file__
    if not _FILE.exists():
        raise ImportError(
            f"Extension horovod.tensorflow has not been built: {_FILE} not found\n"
            "Install horovod-rs from a wheel for this platform."
        )
    try:
        library = tf.load_op_library(str(_FILE))
    except (tf.errors.OpError, RuntimeError) as error:
        raise ImportError(
            f"Extension horovod.tensorflow cannot be loaded with TensorFlow {tf.__version__}: {error}"
        ) from error
    if not hasattr(library, "horovod_allreduce"):
        raise ImportError(
            f"Extension horovod.tensorflow does not work with TensorFlow {tf.__version__}: {_problem(library)}"
        )
    return library


def _problem(library: Any) -> str:
    """Return the text of the load problem. The library registers an operation whose default value is this text."""
    function = getattr(library, _PROBLEM, None)
    if function is None:
        return (
            "its C functions for custom operations were not found (see the standard error stream), or "
            f"{_FILE} was loaded before TensorFlow"
        )
    return str(inspect.signature(function).parameters["text"].default)


LIBRARY: Final = _load()
want_handlers_to_run()
