"""Shared code of `horovod.keras` and `horovod.tensorflow.keras`, for Keras 3 on all backends, and for Keras 2."""

from __future__ import annotations

from typing import Any

from horovod._keras import _values
from horovod._keras._callable_list import CallableList
from horovod._keras._generation import is_keras3, keras3_backend
from horovod._keras._models import load_model
from horovod._keras._optimizer import create_distributed_optimizer, register_local_layers
from horovod.common import api, host_memory
from horovod.common._ops import Average, resolve_op
from horovod.common._reduction import Reduction

__all__ = [
    "CallableList",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "create_distributed_optimizer",
    "load_model",
    "nccl_built",
    "reducescatter",
    "register_local_layers",
]

_NO_GLOBALS = (
    "Keras 3 with the backend {} has no global variables: use "
    "hvd.callbacks.BroadcastGlobalVariablesCallback, or broadcast the weights of the model and the variables of its "
    "optimizer."
)


def nccl_built(keras: Any) -> int:
    """Return the result of `nccl_built` in the adapter of Keras's backend."""
    if is_keras3(keras) and keras3_backend() == "torch":
        return api.nccl_built()
    return host_memory.nccl_built()


def broadcast_global_variables(keras: Any, root_rank: int) -> Any:
    """Broadcast the global variables of a graph of TensorFlow 1 style; raise RuntimeError without such a graph."""
    if is_keras3(keras) and keras3_backend() != "tensorflow":
        raise RuntimeError(_NO_GLOBALS.format(keras3_backend()))
    import horovod.tensorflow as hvd

    return hvd.broadcast_global_variables(root_rank)


def allreduce(
    keras: Any,
    value: Any,
    name: str | None,
    average: bool | None,
    prescale_factor: float,
    postscale_factor: float,
    op: int | str | None,
    compression: Any,
) -> Any:
    """Combine a value of every rank and return the result; `op` overrides `average`."""
    # `average=True` is the default in some packages, so it is not passed on: it would cause a deprecation warning.
    code = resolve_op(op, None if op is not None or average else average)
    reduction = Reduction(code, prescale_factor, postscale_factor)
    return _values.allreduce(value, name, reduction, compression, _tensor_maker(keras))


def allgather(keras: Any, value: Any, name: str | None) -> Any:
    """Return the values of all ranks, concatenated along the first dimension."""
    return _values.allgather(value, name, _tensor_maker(keras))


def broadcast(keras: Any, value: Any, root_rank: int, name: str | None) -> Any:
    """Return the root's value on every rank."""
    return _values.broadcast(value, root_rank, name, _tensor_maker(keras))


def reducescatter(keras: Any, value: Any, name: str | None, op: int | str = Average) -> Any:
    """Combine the values of all ranks and return this rank's part of the rows."""
    return _values.reducescatter(value, name, op, _tensor_maker(keras))


def _tensor_maker(keras: Any) -> _values.ToTensor:
    if is_keras3(keras):
        convert: _values.ToTensor = keras.ops.convert_to_tensor
        return convert
    import tensorflow as tf

    constant: _values.ToTensor = tf.constant
    return constant
