"""Allreduce in all its forms: reduce tensors over the ranks and return the result on each of them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from horovod.common._collectives import require_members
from horovod.common._compression import Compressor, NoneCompressor
from horovod.common._ops import resolve_op
from horovod.common._reduction import Reduction
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch._autograd import Collective
from horovod.torch._handles import eagerly, synchronize
from horovod.torch._profiling import is_outermost, profiler, recorded
from horovod.torch._tensors import (
    allreduce_plain,
    allreduce_plain_and_wait,
    collectives,
    grouped_allreduce_plain,
)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an in-place `allreduce_` and return its handle for `poll` and `synchronize`.

    The tensor must not be touched before `synchronize`, which also is what writes the result into a tensor
    that is not dense. Parameters and errors as in `allreduce`; those that all ranks share are raised by
    `synchronize`.
    """
    if average is not None or type(op) is not int:
        op = resolve_op(op, average)
    if is_dynamo_compiling():
        return eagerly(
            allreduce_async_, tensor, None, name, op, prescale_factor, postscale_factor, process_set
        )
    if profiler._is_profiler_enabled and is_outermost():
        return recorded(
            allreduce_async_, tensor, None, name, op, prescale_factor, postscale_factor, process_set
        )
    # This branch runs once per gradient and step: every look-up in it was counted.
    plain = allreduce_plain(
        tensor,
        name,
        op,
        prescale_factor,
        postscale_factor,
        process_set.process_set_id,  # None, a set that is not registered, is a ValueError
    )
    if plain is not None:
        return plain
    return collectives.allreduce_async_(
        tensor, None, name, op, prescale_factor, postscale_factor, process_set
    )


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an `allreduce` into a new tensor and return its handle for `poll` and `synchronize`.

    Not differentiable. The input must not be changed before `synchronize`. Parameters and errors as in
    `allreduce`; those that all ranks share are raised by `synchronize`.
    """
    op = resolve_op(op, average)
    reduction = Reduction(op, prescale_factor, postscale_factor, process_set)
    if is_dynamo_compiling():
        return eagerly(allreduce_async, tensor, None, name, *reduction)
    if profiler._is_profiler_enabled and is_outermost():
        return recorded(allreduce_async, tensor, None, name, *reduction)
    return collectives.allreduce_async(tensor, None, name, *reduction)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Combine one tensor of every rank in place: each rank's tensor becomes the result, and is returned.

    Autograd does not see the change; leaves that require gradients may be passed. Dense tensors are worked on where
    they are if they have the same order of strides on all ranks (contiguous, channels-last, transposed); others as a
    copy, written back. Parameters and errors as in `allreduce`.
    """
    if average is not None or type(op) is not int:
        op = resolve_op(op, average)
    if not is_dynamo_compiling():
        if profiler._is_profiler_enabled and is_outermost():
            return recorded(
                allreduce_, tensor, None, name, op, prescale_factor, postscale_factor, process_set
            )
        done: torch.Tensor | None = allreduce_plain_and_wait(
            tensor, name, op, prescale_factor, postscale_factor, process_set.process_set_id
        )
        if done is not None:
            return done
    handle = allreduce_async_(
        tensor, None, name, op, prescale_factor, postscale_factor, process_set
    )
    result: torch.Tensor = synchronize(handle)
    return result


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start a `grouped_allreduce_` and return its handle; `synchronize` gives the tuple of the inputs."""
    op = resolve_op(op, average)
    reduction = Reduction(op, prescale_factor, postscale_factor, process_set)
    if is_dynamo_compiling():
        return eagerly(grouped_allreduce_async_, tensors, None, name, *reduction)
    if profiler._is_profiler_enabled and is_outermost():
        return recorded(grouped_allreduce_async_, tensors, None, name, *reduction)
    tensors = tuple(tensors)
    require_members(tensors)
    set_id = process_set.process_set_id
    plain = grouped_allreduce_plain(
        tensors, "grouped_allreduce", name, (op, prescale_factor, postscale_factor), set_id
    )
    if plain is not None:
        return plain
    return collectives.grouped_allreduce_async_(tensors, None, name, *reduction)


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start a `grouped_allreduce` and return its handle; `synchronize` gives a tuple of new tensors.

    Not differentiable.
    """
    op = resolve_op(op, average)
    reduction = Reduction(op, prescale_factor, postscale_factor, process_set)
    if is_dynamo_compiling():
        return eagerly(grouped_allreduce_async, tensors, None, name, *reduction)
    if profiler._is_profiler_enabled and is_outermost():
        return recorded(grouped_allreduce_async, tensors, None, name, *reduction)
    return collectives.grouped_allreduce_async(tensors, None, name, *reduction)


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, ...]:
    """Combine several tensors in place as one operation and return the tuple of the inputs.

    Parameters and errors as in `grouped_allreduce`, aliasing as in `allreduce_`.
    """
    handle = grouped_allreduce_async_(
        tensors, average, name, op, prescale_factor, postscale_factor, process_set
    )
    result: tuple[torch.Tensor, ...] = synchronize(handle)
    return result


class HorovodAllreduce(Collective):
    """Differentiable allreduce; the gradient is the same allreduce of the incoming gradient.

    Its arguments are those of `allreduce_async`.
    """

    op_at = 3

    @staticmethod
    def run(tensor: torch.Tensor, average: Any, name: Any, *reduction: Any) -> torch.Tensor:
        """Reduce into a new tensor."""
        result: torch.Tensor = synchronize(allreduce_async(tensor, average, name, *reduction))
        return result

    @staticmethod
    def remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        """Keep how it was reduced."""
        _, average, _, op, *rest = inputs
        ctx.reduction = Reduction(resolve_op(op, average), *rest)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        """Reduce the gradient in the same way."""
        grad = allreduce(grad_output, **ctx.reduction._asdict())
        return grad, None, None, None, None, None, None


class HorovodGroupedAllreduce(Collective):
    """Differentiable grouped allreduce; the gradients are reduced as one group again.

    Its arguments are those of `grouped_allreduce_async`, with the tensors at the end.
    """

    op_at = 2

    @staticmethod
    def run(average: Any, name: Any, *inputs: Any) -> tuple[torch.Tensor, ...]:
        """Reduce into new tensors."""
        handle = grouped_allreduce_async(inputs[4:], average, name, *inputs[:4])
        result: tuple[torch.Tensor, ...] = synchronize(handle)
        return result

    @staticmethod
    def remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        """Keep how they were reduced."""
        average, _, op, *rest = inputs[:6]
        ctx.reduction = Reduction(resolve_op(op, average), *rest)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        """Reduce the gradients in the same way."""
        grads = grouped_allreduce(grad_outputs, **ctx.reduction._asdict())
        return (None, None, None, None, None, None, *grads)


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = NoneCompressor,
    op: int | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Combine one tensor of every rank and return the result on all of them.

    The result is `postscale_factor * reduce(prescale_factor * tensor)`, bitwise the same on every rank.
    Differentiable: the gradient is the same allreduce of the incoming gradient, for which every member of the
    process set has to run its backward pass.

    Parameters
    ----------
    tensor
        Any shape, also 0-dim and empty; the same shape and dtype on every rank. Any integer or floating dtype
        incl. bfloat16; bool without Average; complex with Sum and Average; Adasum needs a floating dtype.
        Not modified; the result is a new contiguous tensor on the same device.
    average
        Deprecated: True means `op=Average`, False `op=Sum`.
    name
        Pairs the call across ranks. Without one, all ranks must issue their unnamed calls in the same order.
    compression
        Makes the tensor smaller for the wire, such as `Compression.fp16`; the reduction itself happens in
        the small dtype.
    op
        `Average` (the default) divides the sum by the number of members, integers toward zero; float16 and
        bfloat16 are summed in float32. `Sum`, `Min`, `Max`, `Product`; on bool these are or, and, or, and.
        `Adasum` combines gradients by their directions; any number of ranks, any process set. Of tensors on GPUs it
        averages the members on each host and combines the hosts where `nccl_built()` is not 0.
    prescale_factor, postscale_factor
        Multiplied before and after the reduction; integer results are truncated toward zero.
    process_set
        The ranks that take part; only members may call.

    Raises
    ------
    ValueError
        Unsupported dtype, device or layout on this rank, both `op` and `average`, a name that is still in
        flight, or not a member; nothing was sent.
    HorovodInternalError
        Ranks disagree (the message names the tensor and both values), a member was lost, or Horovod is not
        initialised.

    Examples
    --------
    >>> loss = hvd.allreduce(loss.detach(), name="loss").item()
    """
    op = resolve_op(op, average)
    reduction = Reduction(op, prescale_factor, postscale_factor, process_set)
    if is_dynamo_compiling():
        return eagerly(allreduce, tensor, None, name, compression, *reduction)
    if profiler._is_profiler_enabled and is_outermost():
        return recorded(allreduce, tensor, None, name, compression, *reduction)
    compressed, ctx = compression.compress(tensor)
    reduced = HorovodAllreduce.call(compressed, None, name, *reduction)
    result: torch.Tensor = compression.decompress(reduced, ctx)
    return result


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = NoneCompressor,
    op: int | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Combine several tensors of every rank as one operation and return the list of results.

    All are reduced or none: the operation starts when every rank has issued the whole group, and a mistake in
    one tensor fails the group. Every rank passes the same number of tensors in the same order; dtypes and
    shapes may differ within the group. Differentiable as one group.

    Parameters and errors as in `allreduce`; messages call the members `<name>_<i>of<n>`. An empty group is a
    ValueError.
    """
    op = resolve_op(op, average)
    reduction = Reduction(op, prescale_factor, postscale_factor, process_set)
    if is_dynamo_compiling():
        return eagerly(grouped_allreduce, tensors, None, name, compression, *reduction)
    if profiler._is_profiler_enabled and is_outermost():
        return recorded(grouped_allreduce, tensors, None, name, compression, *reduction)
    tensors = tuple(tensors)
    require_members(tensors)
    compressed, contexts = zip(*(compression.compress(t) for t in tensors), strict=True)
    reduced = HorovodGroupedAllreduce.call(None, name, *reduction, *compressed)
    return [compression.decompress(t, ctx) for t, ctx in zip(reduced, contexts, strict=True)]
