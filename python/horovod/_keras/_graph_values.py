"""Finds the adapter for tensors without a value, which belong to a step that TensorFlow or JAX compiles."""

from __future__ import annotations

import sys
from typing import Any

from horovod._keras._variables import framework_value

_NO_VALUE = (
    "{} is a symbolic tensor of a Keras model that is being built, which has no value on any rank. Call the function "
    "in train_step, in the call method of a layer, or with a value."
)


def adapter_of(value: Any) -> Any:
    """Return the adapter whose operations are added to the compiled step of this value; None if the value is concrete.

    Raises
    ------
    TypeError
        The value is a symbolic tensor of a model that is being built.
    """
    if type(value).__name__ == "KerasTensor":
        raise TypeError(_NO_VALUE.format(value))
    tensorflow: Any = sys.modules.get("tensorflow")
    if tensorflow is not None and _is_of_graph(tensorflow, value):
        import horovod.tensorflow

        return horovod.tensorflow
    jax: Any = sys.modules.get("jax")
    if jax is not None and isinstance(framework_value(value), jax.core.Tracer):
        import horovod.jax

        return horovod.jax
    return None


def _is_of_graph(tensorflow: Any, value: Any) -> bool:
    if tensorflow.executing_eagerly():
        return False
    return isinstance(framework_value(value), tensorflow.Tensor | tensorflow.Variable)
