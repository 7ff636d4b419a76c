"""Reads, assigns and broadcasts values of Keras variables of any generation and backend as NumPy arrays."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

import horovod.numpy as hvd
from horovod.common.exceptions import HorovodInternalError
from horovod.common.process_sets import ProcessSet, global_process_set


def variables_of(optimizer: Any) -> list[Any]:
    """Return the variables of an optimizer of any generation: `variables` is a property or a method."""
    variables = optimizer.variables
    return list(variables() if callable(variables) else variables)


def attach_state(model: Any) -> None:
    """Write a model's state to its variables: during `fit`, Keras on JAX stores it outside of them."""
    sync = getattr(model, "jax_state_sync", None)
    if sync is not None:
        sync()


def value_of(variable: Any) -> np.ndarray[Any, Any]:
    """Return a copy of a variable's value in host memory."""
    return to_numpy(variable)


def to_numpy(value: Any) -> np.ndarray[Any, Any]:
    """Return a copy of a variable, tensor, number or array in host memory."""
    value = framework_value(value)
    if not hasattr(value, "detach"):
        return np.array(value.numpy() if hasattr(value, "numpy") else value)
    host = value.detach().cpu()
    if str(host.dtype) == "torch.bfloat16":
        import ml_dtypes

        return np.array(host.float().numpy()).astype(ml_dtypes.bfloat16)
    return np.array(host.numpy())


def flat(value: Any) -> Any:
    """Return the elements of a variable, tensor or array in one dimension, on the same device."""
    inner = framework_value(value)
    if type(inner).__module__.startswith("tensorflow."):
        return sys.modules["tensorflow"].reshape(inner, [-1])
    return inner.reshape(-1)


def framework_value(value: Any) -> Any:
    """Return the framework's tensor or variable inside of a variable of Keras 3; return any other value unchanged."""
    inner = getattr(value, "value", None)
    # `value` of a `tf.Variable` is a method.
    return value if inner is None or callable(inner) else inner


def name_of(variable: Any) -> str:
    """Return the name of a variable for messages."""
    return str(getattr(variable, "path", None) or getattr(variable, "name", variable))


def assign(variable: Any, value: np.ndarray[Any, Any]) -> None:
    """Assign a copy of the value to a variable: a backend may use the assigned memory itself."""
    target = getattr(variable, "value", None)
    if hasattr(target, "detach") and value.dtype.name == "bfloat16":
        value = value.astype(np.float32)
    variable.assign(value.copy())


def broadcast(
    variables: Iterable[Any],
    root_rank: int,
    prefix: str,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Assign the root's values to the variables of every rank.

    Variables are paired by their positions, which must be the same on all ranks. Keras numbers the names, which may
    therefore differ between ranks.

    Raises
    ------
    HorovodInternalError
        Numbers of variables, shapes or dtypes differ between ranks, or a rank was lost.
    """
    listed: Sequence[Any] = list(variables)
    arrays = [value_of(variable) for variable in listed]
    handles = [
        hvd.broadcast_async(array, root_rank, f"{prefix}.{i}of{len(listed)}", process_set)
        for i, array in enumerate(arrays)
    ]
    # All handles are waited for, also after a failure: no operation may still use memory that is released here.
    results: list[Any] = []
    failure: HorovodInternalError | None = None
    for variable, handle in zip(listed, handles, strict=True):
        try:
            results.append(hvd.synchronize(handle))
        except HorovodInternalError as error:
            if failure is None:
                error.add_note(f"This was the variable {name_of(variable)}.")
                failure = error
    if failure is not None:
        raise failure
    is_root = hvd.rank() == root_rank
    for variable, value in zip(listed, results, strict=True):
        if not is_root:
            assign(variable, value)
