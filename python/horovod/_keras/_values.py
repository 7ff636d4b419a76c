"""Collective operations on single values, for scripts: arrays, numbers and tensors of the backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.numpy as hvd
from horovod._keras._variables import to_numpy
from horovod.common._ops import Average, resolve_op

# Makes a tensor of the caller's Keras of an array.
ToTensor = Callable[[Any], Any]


def allreduce(
    value: Any,
    name: str | None,
    average: bool | None,
    prescale_factor: float,
    postscale_factor: float,
    op: int | str | None,
    compression: Any,
    to_tensor: ToTensor,
) -> Any:
    """Combine a value of every rank; `op` counts where both it and `average` are given."""
    # The older argument has a default in some packages, which is not worth its note.
    code = resolve_op(op, None if op is not None or average else average)
    tensor, context = compression.compress(to_tensor(value))
    reduced = hvd.allreduce(
        to_numpy(tensor),
        name=name,
        op=code,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
    )
    return compression.decompress(to_tensor(reduced), context)


def allgather(value: Any, name: str | None, to_tensor: ToTensor) -> Any:
    """The values of all ranks one after the other along dimension 0, which may differ between ranks."""
    return to_tensor(hvd.allgather(to_numpy(value), name=name))


def broadcast(value: Any, root_rank: int, name: str | None, to_tensor: ToTensor) -> Any:
    """The root's value on every rank."""
    return to_tensor(hvd.broadcast(to_numpy(value), root_rank, name=name))


def reducescatter(value: Any, name: str | None, op: int | str, to_tensor: ToTensor) -> Any:
    """Combine the values of all ranks and give each its part of the rows."""
    return to_tensor(hvd.reducescatter(to_numpy(value), name=name, op=op))


__all__ = ["Average", "allgather", "allreduce", "broadcast", "reducescatter"]
