"""Finds the generation of Keras of an object by the methods of its class: one process may use both generations."""

from __future__ import annotations

import sys
from typing import Any

# Backends of Keras 3 that compute gradients.
BACKENDS = ("tensorflow", "torch", "jax")


def is_keras3_optimizer(optimizer: Any) -> bool:
    """Return whether an optimizer or optimizer class is from Keras 3: only these have `stateless_apply`."""
    return hasattr(optimizer, "stateless_apply")


def is_keras2_optimizer(optimizer: Any) -> bool:
    """Return whether an optimizer is from Keras 2 (tf_keras), new or legacy."""
    return not is_keras3_optimizer(optimizer) and (
        hasattr(optimizer, "compute_gradients") or hasattr(optimizer, "_compute_gradients")
    )


def is_keras3(keras: Any) -> bool:
    """Return whether a module, such as `keras`, `tf_keras` or `tf.keras`, is Keras 3."""
    return is_keras3_optimizer(keras.optimizers.Optimizer)


def keras3_backend() -> str:
    """Return the name of Keras 3's backend in this process."""
    keras: Any = sys.modules["keras"]
    return str(keras.backend.backend())


def require_training(backend: str) -> None:
    """Raise ValueError unless the backend computes gradients."""
    if backend not in BACKENDS:
        raise ValueError(
            f"Keras runs with the backend {backend!r}, which computes no gradients, so there is nothing to reduce. Set "
            "KERAS_BACKEND to tensorflow, torch or jax before Keras is imported."
        )
