"""Gradients of the registered operations."""

import os
import struct
from typing import Any, Final

import tensorflow as tf

from horovod.common._ops import Average, Sum
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.tensorflow import _operations as ops


def _allreduce_grad(op: Any, grad: Any) -> Any:
    """Reduce the gradient with the same operator and factors."""
    return ops._allreduce(grad, **_reduction_of(op), **_scope_of(op))


def _grouped_allreduce_grad(op: Any, *grads: Any) -> Any:
    """Reduce the gradients with the same operator and factors, as one group."""
    return ops._grouped_allreduce(list(grads), **_reduction_of(op), **_scope_of(op))


def _allgather_grad(op: Any, grad: Any) -> Any:
    """Average the gradient over the ranks and return this rank's rows."""
    return _own_rows(op, op.inputs[0], grad)


def _grouped_allgather_grad(op: Any, *grads: Any) -> Any:
    """Average each gradient in a separate operation: TensorFlow may pass missing gradients as zeros of another type."""
    return [_own_rows(op, tensor, grad) for tensor, grad in zip(op.inputs, grads, strict=True)]


def _broadcast_grad(op: Any, grad: Any) -> Any:
    """Return the averaged gradient on the root, and zeros on other ranks."""
    averaged = ops._allreduce(grad, op=Average, **_scope_of(op))
    is_root = tf.equal(ops.rank_op(), op.get_attr("root_rank"))
    return tf.where(is_root, averaged, tf.zeros_like(averaged))


def _alltoall_grad(op: Any, grad: Any, _received_splits_grad: Any) -> Any:
    """Send each row of the gradient back to the rank of which the row was received."""
    sent_back, _ = ops.alltoall(grad, splits=op.outputs[1], **_scope_of(op))
    return [sent_back, None]


def _reducescatter_grad(op: Any, grad: Any) -> Any:
    """Multiply the gradient by the reduction's factors and gather it from all ranks."""
    return ops.allgather(_scaled(op, grad), **_scope_of(op))


def _grouped_reducescatter_grad(op: Any, *grads: Any) -> Any:
    """Gather each scaled gradient in a separate operation, as in `_grouped_allgather_grad`."""
    return [ops.allgather(_scaled(op, grad), **_scope_of(op)) for grad in grads]


def _own_rows(op: Any, tensor: Any, grad: Any) -> Any:
    """Return this rank's rows of the averaged gradient of a gathered tensor; ranks may have different row counts."""
    scope = _scope_of(op)
    averaged = ops._allreduce(grad, op=Average, **scope)
    with tf.device("/cpu:0"):
        rows = tf.shape(tensor)[:1]
        everyone = ops.allgather(rows, **scope)
        start = tf.reduce_sum(everyone[: _rank_in(scope["process_set"])])
    own = averaged[start : start + rows[0]]
    own.set_shape(tensor.shape)
    return own


def _scaled(op: Any, grad: Any) -> Any:
    """Return the gradient multiplied by the factors of a reducescatter, and by its number of members for `Sum`."""
    reduction = _reduction_of(op)
    grad = tf.convert_to_tensor(grad)
    if reduction["op"] == Sum:
        grad = grad * tf.cast(_size_of(_scope_of(op)["process_set"]), grad.dtype)
    for factor in (reduction["prescale_factor"], reduction["postscale_factor"]):
        if factor != 1.0:
            grad = grad * tf.cast(factor, grad.dtype)
    return grad


def _scope_of(op: Any) -> dict[str, Any]:
    """Return the arguments for the process set and the operation's name.

    The name is made from the differentiated operation. The name of the gradient's tensor contains layer names, whose
    counters include all layers of a process and may differ between ranks.
    """
    node = None if tf.executing_eagerly() else op.outputs[0].op.name.rpartition("/")[2]
    return {
        "name": node and f"{node}_grad",
        "ignore_name_scope": op.get_attr("ignore_name_scope"),
        "process_set": _process_set(op.get_attr("process_set_id")),
    }


def _reduction_of(op: Any) -> dict[str, Any]:
    """Return the arguments for the operator and its factors."""
    return {
        "op": op.get_attr("reduce_op"),
        "prescale_factor": _factor_of(op, "prescale"),
        "postscale_factor": _factor_of(op, "postscale"),
    }


def _factor_of(op: Any, which: str) -> float:
    bits = op.get_attr(f"{which}_bits")
    if bits == 0:
        return float(op.get_attr(f"{which}_factor"))
    (factor,) = struct.unpack("<d", struct.pack("<q", bits))
    return float(factor)


def _process_set(number: int) -> ProcessSet:
    """Return a process set that has only the given id, without ranks; the global set for 0."""
    if number == 0:
        return global_process_set
    process_set = ProcessSet([])
    process_set.process_set_id = number
    return process_set


def _is_elastic() -> bool:
    """Return whether the job is elastic, so that sizes and ranks may change between runs of a graph."""
    setting = os.environ.get("HOROVOD_ELASTIC", "")
    return setting.strip().lstrip("-").isdigit() and int(setting) != 0


def _size_of(process_set: ProcessSet) -> Any:
    if _is_elastic():
        return ops.size_op(process_set.process_set_id or 0)
    return process_set.size()


def _rank_in(process_set: ProcessSet) -> Any:
    if _is_elastic() and process_set.process_set_id == 0:
        return ops.rank_op()
    return process_set.rank()


REGISTERED: Final = {
    "HorovodAllreduce": _allreduce_grad,
    "HorovodGroupedAllreduce": _grouped_allreduce_grad,
    "HorovodAllgather": _allgather_grad,
    "HorovodGroupedAllgather": _grouped_allgather_grad,
    "HorovodBroadcast": _broadcast_grad,
    "HorovodAlltoall": _alltoall_grad,
    "HorovodReducescatter": _reducescatter_grad,
    "HorovodGroupedReducescatter": _grouped_reducescatter_grad,
}

for _kind, _gradient in REGISTERED.items():
    tf.RegisterGradient(_kind)(_gradient)
for _query in ("Size", "ProcessSetIncluded", "LocalSize", "Rank", "LocalRank"):
    tf.no_gradient(f"Horovod{_query}")
