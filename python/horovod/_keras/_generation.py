"""Which generation of Keras an object is of: told by what its class can do, as both may be alive in one process."""

from __future__ import annotations

import sys
from typing import Any

# Backends of Keras 3 that compute gradients.
BACKENDS = ("tensorflow", "torch", "jax")


def is_keras3_optimizer(optimizer: Any) -> bool:
    """Whether an optimizer, or a class of them, is one of Keras 3: only these can be applied without state."""
    return hasattr(optimizer, "stateless_apply")


def is_keras2_optimizer(optimizer: Any) -> bool:
    """Whether an optimizer is one of Keras 2 (tf_keras), new or legacy."""
    return not is_keras3_optimizer(optimizer) and (
        hasattr(optimizer, "compute_gradients") or hasattr(optimizer, "_compute_gradients")
    )


def is_keras3(keras: Any) -> bool:
    """Whether a module, such as `keras`, `tf_keras` or `tf.keras`, is Keras 3."""
    return is_keras3_optimizer(keras.optimizers.Optimizer)


def keras3_backend() -> str:
    """The name of the backend with which Keras 3 runs in this process."""
    keras: Any = sys.modules["keras"]
    return str(keras.backend.backend())


def require_training(backend: str) -> None:
    """Raise unless the backend can train."""
    if backend not in BACKENDS:
        raise ValueError(
            f"Keras runs with the backend {backend!r}, which computes no gradients, so there is nothing to reduce. Set "
            "KERAS_BACKEND to tensorflow, torch or jax before Keras is imported."
        )
