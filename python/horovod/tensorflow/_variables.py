"""Helpers for variables, layers and optimizers of TensorFlow and both Keras generations."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable
from typing import Any

import tensorflow as tf

__all__ = ["is_keras_layer", "key_of", "refs_to_vars", "tf_variable", "vars_to_refs"]


def tf_variable(variable: Any) -> Any:
    """Return the `tf.Variable` inside a variable of Keras 3; return any other object unchanged.

    Raises
    ------
    TypeError
        The variable of Keras 3 belongs to another backend.
    """
    value = getattr(variable, "value", None)
    if value is None or callable(value):  # `value` is a method of tf.Variable
        return variable
    inner = getattr(variable, "_value", value)
    if hasattr(inner, "assign"):
        return inner
    raise TypeError(
        f"horovod.tensorflow works on variables of TensorFlow, not on {type(variable).__module__}."
        f"{type(variable).__qualname__} that holds a {type(inner).__module__}.{type(inner).__qualname__}; for other "
        "backends of Keras use horovod.keras."
    )


def key_of(variable: Any) -> Hashable:
    """Return a dict key that is equal for a variable of Keras 3 and the `tf.Variable` inside it."""
    inner = tf_variable(variable)
    return inner.ref() if hasattr(inner, "ref") else id(inner)


def vars_to_refs(vars: Any) -> Any:
    """Return nested lists of variables as tuples of references, which can be keys of a dict."""
    if isinstance(vars, (list, tuple)):
        return tuple(vars_to_refs(entry) for entry in vars)
    return tf_variable(vars).ref()


def refs_to_vars(refs: Any) -> Any:
    """Return the variables of nested references; this inverts `vars_to_refs`, with tuples in place of lists."""
    if isinstance(refs, (list, tuple)):
        return tuple(refs_to_vars(entry) for entry in refs)
    return refs.deref()


def is_keras_layer(value: Any) -> bool:
    """Return whether this is a layer of Keras, of either generation; does not import Keras."""
    return isinstance(value, _classes("Layer"))


def is_keras_optimizer(value: Any) -> bool:
    """Return whether this is an optimizer of Keras, of either generation; does not import Keras."""
    return isinstance(value, _classes("Optimizer"))


def _classes(name: str) -> tuple[type, ...]:
    """Return the base classes of that name in imported modules; an instance exists only if its module is imported."""
    found: list[type] = []
    for module in ("keras", "tf_keras"):
        if module not in sys.modules:
            continue
        keras = sys.modules[module]
        places = [getattr(keras, "layers", None), getattr(keras, "optimizers", None)]
        places.append(getattr(places[1], "legacy", None))
        found += [c for c in _named(places, name) if isinstance(c, type)]
    return tuple(found)


def _named(places: Iterable[Any], name: str) -> list[Any]:
    return [getattr(place, name) for place in places if hasattr(place, name)]


def slices_as_dense(gradient: Any) -> Any:
    """Return the gradient as a dense tensor."""
    return tf.convert_to_tensor(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient
