"""Collective operations on single values of scripts: arrays, numbers and tensors of the backend.

For a tensor of a compiled step, the backend's adapter adds the operation to the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import horovod.numpy as hvd
from horovod._keras._graph_values import adapter_of
from horovod._keras._variables import framework_value, to_numpy
from horovod.common import _narrowing
from horovod.common._ops import Average, resolve_op
from horovod.common._reduction import Reduction

# Converts an array to a tensor of the caller's Keras.
ToTensor = Callable[[Any], Any]


def allreduce(
    value: Any,
    name: str | None,
    reduction: Reduction,
    compression: Any,
    to_tensor: ToTensor,
) -> Any:
    """Combine a value of every rank and return the result."""
    options = reduction._asdict()
    adapter = adapter_of(value)
    if adapter is not None:
        tensor, context = compression.compress(framework_value(value))
        result = adapter.allreduce(tensor, name=name, **options)
        return compression.decompress(result, context)
    if _is_integer(value):
        # Keras would convert the value to 32 bits, and the result may need more.
        _narrowing.check_room(np.asarray(value), reduction)
        total = hvd.allreduce(np.asarray(value), name=name, **options)
        # Keras chooses a type for Python's numbers, but not all backends check whether the numbers of a list fit.
        is_plain = isinstance(value, int) or (
            isinstance(value, list | tuple) and np.abs(total).max() < 2**31
        )
        return _exactly(total, to_tensor, total.tolist() if is_plain else total)
    array = np.asarray(value) if _is_list_of_numbers(value) else value
    tensor, context = compression.compress(_exactly(array, to_tensor, value))
    reduced = hvd.allreduce(to_numpy(tensor), name=name, **options)
    return compression.decompress(_exactly(reduced, to_tensor, reduced), context)


def _is_integer(value: Any) -> bool:
    """Return whether the value is an integer, a NumPy array of integers, or a list of these; not a tensor."""
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype.kind in "iu"
    if isinstance(value, list | tuple):
        return bool(value) and all(map(_is_integer, value))
    return type(value) is int


def _is_list_of_numbers(value: Any) -> bool:
    """Return whether the value is a list, maybe nested, that contains only numbers and NumPy arrays, no tensors."""

    def is_number(entry: Any) -> bool:
        return isinstance(entry, int | float | complex | np.generic | np.ndarray)

    return isinstance(value, list | tuple) and all(
        is_number(entry) or _is_list_of_numbers(entry) for entry in value
    )


def _exactly(array: Any, to_tensor: ToTensor, given: Any) -> Any:
    """Convert `given` to a tensor of Keras, check that it has the values of `array`, and return it.

    Raises
    ------
    OverflowError
        The backend has no type that can represent the values.
    """
    tensor = to_tensor(given)
    if isinstance(array, np.ndarray | np.generic | float | complex):
        _narrowing.check_kept(
            np.asarray(array),
            to_numpy(tensor),
            is_plain=_narrowing.is_plain_number(given) or isinstance(given, list | tuple),
            cure="The tensors of this backend of Keras have no wider type for it; horovod.numpy has 64 bits.",
        )
    return tensor


def allgather(value: Any, name: str | None, to_tensor: ToTensor) -> Any:
    """Return the values of all ranks, concatenated along dimension 0, whose size may differ between ranks."""
    adapter = adapter_of(value)
    if adapter is not None:
        return adapter.allgather(framework_value(value), name=name)
    result = hvd.allgather(to_numpy(value), name=name)
    return _exactly(result, to_tensor, result)


def broadcast(value: Any, root_rank: int, name: str | None, to_tensor: ToTensor) -> Any:
    """Return the root's value on every rank."""
    adapter = adapter_of(value)
    if adapter is not None:
        return adapter.broadcast(framework_value(value), root_rank, name=name)
    result = hvd.broadcast(to_numpy(value), root_rank, name=name)
    return _exactly(result, to_tensor, result)


def reducescatter(value: Any, name: str | None, op: int | str, to_tensor: ToTensor) -> Any:
    """Combine the values of all ranks and return this rank's part of the rows."""
    adapter = adapter_of(value)
    if adapter is not None:
        return adapter.reducescatter(framework_value(value), name=name, op=resolve_op(op, None))
    result = hvd.reducescatter(to_numpy(value), name=name, op=op)
    return _exactly(result, to_tensor, result)


__all__ = ["Average", "allgather", "allreduce", "broadcast", "reducescatter"]
