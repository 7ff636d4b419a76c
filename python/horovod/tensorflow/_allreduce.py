"""Reductions of dense tensors and `tf.IndexedSlices`, single and in groups; arguments are checked before sending."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from horovod import _core
from horovod.common._ops import Adasum, Average, Product, Sum, resolve_op
from horovod.common._reduction import Reduction
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.tensorflow import mpi_ops
from horovod.tensorflow._autograph import unconverted
from horovod.tensorflow._operations import _set_id
from horovod.tensorflow.compression import Compression

__all__ = [
    "allreduce",
    "grouped_allreduce",
    "grouped_reducescatter",
    "reducescatter",
]

_allreduce = mpi_ops._allreduce
_grouped_allreduce = mpi_ops._grouped_allreduce
_reducescatter = mpi_ops._reducescatter
_grouped_reducescatter = mpi_ops._grouped_reducescatter


def on_device(device: str) -> AbstractContextManager[Any]:
    """Return a context that places operations on a device; TensorFlow chooses if the name is empty."""
    context: AbstractContextManager[Any] = tf.device(device) if device else nullcontext()
    return context


def set_size(process_set: ProcessSet) -> Any:
    """Return the number of members: in elastic jobs a tensor that is evaluated in each run, otherwise an integer."""
    if _core.is_elastic():
        return mpi_ops.size_op(_set_id(process_set))
    return process_set.size()


def divided_by_size(tensor: Any, process_set: ProcessSet) -> Any:
    """Return a tensor or slices divided by the number of members; integers are rounded toward zero."""
    if isinstance(tensor, tf.IndexedSlices):
        if tensor.dtype.is_integer:
            # Rows with the same index are added before the rounding, as in dense tensors.
            tensor = _summed_rows(tensor)
        values = divided_by_size(tensor.values, process_set)
        return tf.IndexedSlices(values, tensor.indices, tensor.dense_shape)
    size = tf.cast(set_size(process_set), tensor.dtype)
    return tf.truncatediv(tensor, size) if tensor.dtype.is_integer else tensor / size


def _summed_rows(slices: Any) -> Any:
    """Return slices with each index once, whose values are the sums of the rows with that index."""
    indices, places = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, places, tf.size(indices))
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def check_reduction(tensors: Sequence[Any], reduction: Reduction) -> None:
    """Raise an error if the arguments of a reduction do not fit together; nothing is sent."""
    op, prescale, postscale, process_set = reduction
    if op == Adasum and process_set.process_set_id != 0:
        raise NotImplementedError("Adasum does not support non-global process sets yet.")
    if not any(isinstance(tensor, tf.IndexedSlices) for tensor in tensors):
        return
    if op == Adasum:
        raise NotImplementedError(
            "The Adasum reduction does not currently support sparse tensors. As a workaround please pass "
            "sparse_as_dense=True to DistributedOptimizer"
        )
    if op not in (Average, Sum):
        raise NotImplementedError("Only Sum and Average ops are supported with tf.IndexedSlices")
    if prescale != 1.0 or postscale != 1.0:
        raise NotImplementedError("Pre/postscale_factor are not supported with tf.IndexedSlices")


def _is_int32(value: Any) -> bool:
    """Return whether TensorFlow converts this Python integer, or nested list of integers, to int32."""
    if isinstance(value, list | tuple):
        return bool(value) and all(map(_is_int32, value))
    return type(value) is int and tf.int32.min <= value <= tf.int32.max


def _magnitudes(value: Any) -> list[int]:
    if isinstance(value, list | tuple):
        return [magnitude for entry in value for magnitude in _magnitudes(entry)]
    return [abs(value)]


def _check_constants(tensors: Sequence[Any], reduction: Reduction) -> None:
    """Raise OverflowError if a sum or product of this rank's Python integers may not fit into int32."""
    size = reduction.process_set.size() or 1
    factor = abs(reduction.prescale_factor * reduction.postscale_factor)
    for value in _magnitudes(list(tensors)):
        result = value * size if reduction.op == Sum else value**size
        if result > tf.int32.max or result * factor > tf.int32.max:
            raise OverflowError(
                f"{value} is an int32 in TensorFlow, and the result of {size} ranks may not fit into that type: pass "
                "tf.constant(..., tf.int64)."
            )


def _as_int32(result: Any) -> Any:
    """Return an int64 result as int32. The result of an allreduce is equal on all ranks, so all ranks raise or none.

    Raises
    ------
    OverflowError
        A value does not fit into int32.
    """
    values = result.numpy()
    if values.size and (values.min() < tf.int32.min or values.max() > tf.int32.max):
        raise OverflowError(
            f"The result {values.tolist()} does not fit into int32, the type that TensorFlow makes of Python's "
            "integers: pass tf.constant(..., tf.int64)."
        )
    return tf.cast(result, tf.int32)


@unconverted
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Combine one tensor of every rank and return the result on all of them.

    Differentiable: the gradient is reduced with the same operator and factors.

    Parameters
    ----------
    tensor
        Tensor, variable or array of any shape, the same shape and dtype on every rank; or `tf.IndexedSlices`. Slices
        are gathered: the result has the rows of all ranks, and rows with the same index stand for their sum, as
        everywhere in TensorFlow. Slices support only `Sum` and `Average`, no factors, and are not compressed.
    average
        Deprecated: use `op`.
    device_dense, device_sparse
        Devices on which operations on tensors and on slices are placed, such as "/cpu:0"; TensorFlow chooses if empty.
    compression
        Compression of the sent tensor: `Compression.none` or `Compression.fp16`.
    op
        `Average` (the default), `Sum`, `Adasum`, `Min`, `Max` or `Product`.
    prescale_factor, postscale_factor
        Factors by which the tensor is multiplied before and after the reduction.
    name
        Name that pairs the call across ranks in graphs; default a name made from the input's name.
    process_set
        The ranks that take part.
    ignore_name_scope
        Whether to pair by the last part of the name only, without the name scopes around the call.

    Raises
    ------
    ValueError
        Both `op` and `average` are given, or `op` is not an operator.
    OverflowError
        `tensor` consists of Python integers, which TensorFlow converts to int32, and the result does not fit.
    NotImplementedError
        The combination of arguments is not supported, such as slices with `Min`. Nothing was sent.
    tf.errors.FailedPreconditionError
        Ranks disagree (the message names the tensor, the ranks and both values), or Horovod is not initialised.
    tf.errors.UnknownError
        A rank was lost.
    """
    op = resolve_op(op, average)
    reduction = Reduction(op, prescale_factor, postscale_factor, process_set)
    check_reduction([tensor], reduction)
    if isinstance(tensor, tf.IndexedSlices):
        with on_device(device_sparse):
            (result,) = _reduced_slices([tensor], op, name, process_set, ignore_name_scope, False)
        return result

    def reduce(sent: Sequence[Any]) -> Sequence[Any]:
        result = mpi_ops._allreduce(
            sent[0],
            name=name,
            ignore_name_scope=ignore_name_scope,
            **reduction._asdict(),
        )
        return [result]

    return _compressed([tensor], device_dense, compression, reduction, reduce)[0]


@unconverted
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> Any:
    """Combine several tensors of every rank as one operation, which starts when all are ready on all ranks.

    Parameters
    ----------
    tensors
        Tensors of one dtype, and `tf.IndexedSlices`, in any mixture.

    Notes
    -----
    The other parameters and the errors are those of `allreduce`.

    Returns
    -------
    The results, in the order of `tensors`.
    """
    if not tensors:
        return tensors
    op = resolve_op(op, average)
    reduction = Reduction(op, prescale_factor, postscale_factor, process_set)
    check_reduction(tensors, reduction)
    sparse = [i for i, t in enumerate(tensors) if isinstance(t, tf.IndexedSlices)]
    dense = [i for i, t in enumerate(tensors) if not isinstance(t, tf.IndexedSlices)]
    results: list[Any] = [None] * len(tensors)
    if sparse:
        with on_device(device_sparse):
            slices = [tensors[i] for i in sparse]
            reduced = _reduced_slices(slices, op, name, process_set, ignore_name_scope, True)
        for i, result in zip(sparse, reduced, strict=True):
            results[i] = result

    def reduce(sent: Sequence[Any]) -> Sequence[Any]:
        together: Sequence[Any] = mpi_ops._grouped_allreduce(
            sent,
            name=name,
            ignore_name_scope=ignore_name_scope,
            **reduction._asdict(),
        )
        return together

    if dense:
        reduced = _compressed(
            [tensors[i] for i in dense], device_dense, compression, reduction, reduce
        )
        for i, result in zip(dense, reduced, strict=True):
            results[i] = result
    return results


@unconverted
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Combine one tensor of every rank and return this rank's share of the result's rows.

    If the rows cannot be divided evenly, the first ranks get one row more.

    Parameters
    ----------
    tensor
        Tensor of at least one dimension; the same shape and dtype on every rank.
    op
        `Average` or `Sum`.

    Notes
    -----
    The other parameters and the errors are those of `allreduce`.
    """
    code = resolve_op(op, None)
    reduction = Reduction(code, prescale_factor, postscale_factor, process_set)

    def reduce(sent: Sequence[Any]) -> Sequence[Any]:
        result = mpi_ops._reducescatter(
            sent[0], name=name, ignore_name_scope=ignore_name_scope, **reduction._asdict()
        )
        return [result]

    return _compressed([tensor], device_dense, compression, reduction, reduce)[0]


@unconverted
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> Any:
    """Reduce and scatter several tensors of one dtype as one operation; see `reducescatter`."""
    if not tensors:
        return tensors
    code = resolve_op(op, None)
    reduction = Reduction(code, prescale_factor, postscale_factor, process_set)

    def reduce(sent: Sequence[Any]) -> Sequence[Any]:
        together: Sequence[Any] = mpi_ops._grouped_reducescatter(
            sent, name=name, **reduction._asdict()
        )
        return together

    return _compressed(tensors, device_dense, compression, reduction, reduce)


def _compressed(
    tensors: Sequence[Any],
    device: str,
    compression: Any,
    reduction: Reduction,
    reduce: Callable[[Sequence[Any]], Sequence[Any]],
) -> list[Any]:
    """Compress the tensors, call `reduce` on them, and return the decompressed results."""
    # A sum of int32 may wrap, but not in int64: the result shows whether it fits into int32. A product may wrap in
    # int64, too, and results have no values while a graph is built. Then this rank's integers are checked instead.
    is_plain = reduction.op in (Sum, Product) and all(map(_is_int32, tensors))
    is_widened = is_plain and reduction.op == Sum and tf.executing_eagerly()
    if is_plain and not is_widened:
        _check_constants(tensors, reduction)
    with on_device(device):
        dtype = tf.int64 if is_widened else None
        packed = [compression.compress(tf.convert_to_tensor(tensor, dtype)) for tensor in tensors]
        results = reduce([tensor for tensor, _ in packed])
        unpacked = [
            compression.decompress(result, context)
            for result, (_, context) in zip(results, packed, strict=True)
        ]
        return list(map(_as_int32, unpacked)) if is_widened else unpacked


def _reduced_slices(
    slices: Sequence[Any],
    op: int,
    name: str | None,
    process_set: ProcessSet,
    ignore_name_scope: bool,
    grouped: bool,
) -> list[Any]:
    """Return slices with the concatenated rows of all ranks, divided by the number of members for `Average`."""

    def gathered(what: str, tensors: Sequence[Any]) -> Sequence[Any]:
        options: dict[str, Any] = {
            "name": f"{name}_{what}" if name else None,
            "process_set": process_set,
            "ignore_name_scope": ignore_name_scope,
        }
        if grouped:
            together: Sequence[Any] = mpi_ops.grouped_allgather(tensors, **options)
            return together
        return [mpi_ops.allgather(tensors[0], **options)]

    values = gathered("values", [entry.values for entry in slices])
    indices = gathered("indices", [entry.indices for entry in slices])
    results = [
        tf.IndexedSlices(*rows, dense_shape=entry.dense_shape)
        for *rows, entry in zip(values, indices, slices, strict=True)
    ]
    return [divided_by_size(entry, process_set) for entry in results] if op == Average else results
