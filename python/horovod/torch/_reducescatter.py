"""Reducescatter: reduce tensors over the ranks and leave a share of the rows on each of them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from horovod.common._collectives import require_members
from horovod.common._compression import Compressor, NoneCompressor
from horovod.common._ops import Average, Sum, resolve_op
from horovod.common._reduction import Reduction
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch._allgather import allgather, grouped_allgather
from horovod.torch._autograd import Collective
from horovod.torch._handles import eagerly, synchronize
from horovod.torch._profiling import is_outermost, profiler, recorded
from horovod.torch._tensors import collectives


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int | str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start a `reducescatter` and return its handle for `poll` and `synchronize`.

    Not differentiable. The input must not be changed before `synchronize`.
    """
    options = (resolve_op(op, None), process_set, prescale_factor, postscale_factor)
    if is_dynamo_compiling():
        return eagerly(reducescatter_async, tensor, name, *options)
    if profiler._is_profiler_enabled and is_outermost():
        return recorded(reducescatter_async, tensor, name, *options)
    return collectives.reducescatter_async(tensor, name, *options)


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int | str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start a `grouped_reducescatter` and return its handle; `synchronize` gives the tuple of results."""
    options = (resolve_op(op, None), process_set, prescale_factor, postscale_factor)
    if is_dynamo_compiling():
        return eagerly(grouped_reducescatter_async, tensors, name, *options)
    if profiler._is_profiler_enabled and is_outermost():
        return recorded(grouped_reducescatter_async, tensors, name, *options)
    return collectives.grouped_reducescatter_async(tensors, name, *options)


def _reduction(
    op: int, process_set: ProcessSet, prescale_factor: float, postscale_factor: float
) -> Reduction:
    return Reduction(op, prescale_factor, postscale_factor, process_set)


def _scaled(grad: torch.Tensor, reduction: Reduction) -> torch.Tensor:
    """The share's gradient as it is gathered: `Sum` counts the members, `Average` does not."""
    factor = reduction.prescale_factor * reduction.postscale_factor
    if reduction.op == Sum:
        factor *= reduction.process_set.size() or 1
    return grad if factor == 1.0 else grad * factor


class HorovodReducescatter(Collective):
    """Differentiable reducescatter; the gradient is the gathered one, times the members for `Sum`.

    Its arguments are those of `reducescatter_async`.
    """

    by_rows = True

    @staticmethod
    def run(tensor: torch.Tensor, name: Any, *options: Any) -> torch.Tensor:
        """Reduce into a new tensor."""
        result: torch.Tensor = synchronize(reducescatter_async(tensor, name, *options))
        return result

    @staticmethod
    def remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        """Keep how it was reduced."""
        ctx.reduction = _reduction(*inputs[2:])

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        """Gather the gradients of the shares."""
        grad = _scaled(grad_output, ctx.reduction)
        grad = allgather(grad, process_set=ctx.reduction.process_set)
        return grad, None, None, None, None, None


class HorovodGroupedReducescatter(Collective):
    """Differentiable grouped reducescatter; see `HorovodReducescatter`. The tensors are the last arguments."""

    by_rows = True

    @staticmethod
    def run(name: Any, *inputs: Any) -> tuple[torch.Tensor, ...]:
        """Reduce into new tensors."""
        handle = grouped_reducescatter_async(inputs[4:], name, *inputs[:4])
        result: tuple[torch.Tensor, ...] = synchronize(handle)
        return result

    @staticmethod
    def remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        """Keep how they were reduced."""
        ctx.reduction = _reduction(*inputs[1:5])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        """Gather the gradients of the shares as one group."""
        grads = grouped_allgather(
            [_scaled(grad, ctx.reduction) for grad in grad_outputs],
            process_set=ctx.reduction.process_set,
        )
        return (None, None, None, None, None, *grads)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = NoneCompressor,
    op: int | str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Combine one tensor of every rank and return this rank's share of the result's rows.

    The first `rows % members` ranks get one row more than the others; a share may be empty. Differentiable:
    the gradient is the concatenation of the shares' gradients, for `Sum` times the number of members, as
    scripts expect it; every member has to run its backward pass.

    Parameters
    ----------
    tensor
        At least one dimension, the same shape and dtype on every rank; dtypes as in `allreduce`. Not modified.
    name
        Pairs the call across ranks. Without one, all ranks must issue their unnamed calls in the same order.
    compression
        Makes the tensor smaller for the wire, such as `Compression.fp16`.
    op
        `Average` (the default) or `Sum`.
    process_set
        The ranks that take part; shares are ordered by rank.
    prescale_factor, postscale_factor
        Multiplied before and after the reduction; integer results are truncated toward zero.

    Raises
    ------
    ValueError
        A scalar, or as in `allreduce`; nothing was sent.
    HorovodInternalError
        Another operator, or as in `allreduce`.
    """
    options = (resolve_op(op, None), process_set, prescale_factor, postscale_factor)
    if is_dynamo_compiling():
        return eagerly(reducescatter, tensor, name, compression, *options)
    if profiler._is_profiler_enabled and is_outermost():
        return recorded(reducescatter, tensor, name, compression, *options)
    compressed, ctx = compression.compress(tensor)
    reduced = HorovodReducescatter.call(compressed, name, *options)
    result: torch.Tensor = compression.decompress(reduced, ctx)
    return result


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = NoneCompressor,
    op: int | str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Reduce and share out several tensors as one operation and return the list of this rank's shares.

    All are reduced or none; every rank passes the same number of tensors in the same order. Differentiable as
    one group. Each tensor, and errors, as in `reducescatter`; an empty group is a ValueError.
    """
    options = (resolve_op(op, None), process_set, prescale_factor, postscale_factor)
    if is_dynamo_compiling():
        return eagerly(grouped_reducescatter, tensors, name, compression, *options)
    if profiler._is_profiler_enabled and is_outermost():
        return recorded(grouped_reducescatter, tensors, name, compression, *options)
    tensors = tuple(tensors)
    require_members(tensors)
    compressed, contexts = zip(*(compression.compress(t) for t in tensors), strict=True)
    reduced = HorovodGroupedReducescatter.call(name, *options, *compressed)
    return [compression.decompress(t, ctx) for t, ctx in zip(reduced, contexts, strict=True)]
