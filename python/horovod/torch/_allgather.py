"""Allgather: concatenate tensors of all ranks along their first dimension."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch._allreduce import allreduce, grouped_allreduce
from horovod.torch._autograd import Collective
from horovod.torch._handles import eagerly, synchronize
from horovod.torch._profiling import is_outermost, profiler, recorded
from horovod.torch._tensors import collectives


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start an `allgather` and return its handle for `poll` and `synchronize`.

    Not differentiable. The input must not be changed before `synchronize`.
    """
    if is_dynamo_compiling():
        return eagerly(allgather_async, tensor, name, process_set)
    if profiler._is_profiler_enabled and is_outermost():
        return recorded(allgather_async, tensor, name, process_set)
    return collectives.allgather_async(tensor, name, process_set)


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start a `grouped_allgather` and return its handle; `synchronize` gives the tuple of results."""
    if is_dynamo_compiling():
        return eagerly(grouped_allgather_async, tensors, name, process_set)
    if profiler._is_profiler_enabled and is_outermost():
        return recorded(grouped_allgather_async, tensors, name, process_set)
    return collectives.grouped_allgather_async(tensors, name, process_set)


class HorovodAllgather(Collective):
    """Differentiable allgather; the gradient is this rank's rows of the averaged incoming gradient."""

    by_rows = True

    @staticmethod
    def run(tensor: torch.Tensor, name: str | None, process_set: ProcessSet) -> torch.Tensor:
        """Gather into a new tensor."""
        result: torch.Tensor = synchronize(allgather_async(tensor, name, process_set))
        return result

    @staticmethod
    def remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        """Keep which rows are this rank's."""
        tensor, _, ctx.process_set = inputs
        ctx.rows = tensor.shape[0]

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        """Average the gradient and cut out this rank's rows."""
        [start] = _first_rows([ctx.rows], ctx.process_set)
        averaged = allreduce(grad_output, average=True, process_set=ctx.process_set)
        return averaged.narrow(0, start, ctx.rows), None, None


class HorovodGroupedAllgather(Collective):
    """Differentiable grouped allgather; see `HorovodAllgather`."""

    by_rows = True

    @staticmethod
    def run(
        name: str | None, process_set: ProcessSet, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Gather into new tensors."""
        handle = grouped_allgather_async(tensors, name, process_set)
        result: tuple[torch.Tensor, ...] = synchronize(handle)
        return result

    @staticmethod
    def remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        """Keep which rows are this rank's."""
        _, ctx.process_set, *tensors = inputs
        ctx.rows = [tensor.shape[0] for tensor in tensors]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        """Average the gradients as one group and cut out this rank's rows."""
        starts = _first_rows(ctx.rows, ctx.process_set)
        averaged = grouped_allreduce(grad_outputs, average=True, process_set=ctx.process_set)
        rows = zip(averaged, starts, ctx.rows, strict=True)
        return (None, None, *(grad.narrow(0, start, n) for grad, start, n in rows))


def _first_rows(rows: list[int], process_set: ProcessSet) -> list[int]:
    """Where this rank's rows begin in each gathered tensor, given how many rows it contributed."""
    own = torch.tensor([rows], dtype=torch.int64, device="cpu")
    # As a differentiable operation, for a transform of torch.func that runs makes tensors of its own.
    everyone: torch.Tensor = HorovodAllgather.call(own, None, process_set)
    me = process_set.rank()
    starts: list[int] = everyone[:me].sum(0).tolist()
    return starts


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Concatenate one tensor of every rank along the first dimension and return it on all of them.

    Differentiable: the gradient is this rank's part of the *average* of the incoming gradients, as scripts
    expect it (a sum would be the derivative); every member has to run its backward pass.

    Parameters
    ----------
    tensor
        At least one dimension. Dimensions but the first, and the dtype, are the same on every rank; the first
        may differ and be 0. Any dtype. Not modified.
    name
        Pairs the call across ranks. Without one, all ranks must issue their unnamed calls in the same order.
    process_set
        The ranks that take part; the result is ordered by rank.

    Raises
    ------
    ValueError
        Unsupported device or layout on this rank, a name that is still in flight, or not a member; nothing
        was sent.
    HorovodInternalError
        Ranks disagree (the message names the tensor and both values), a tensor has no dimension, a member was
        lost, or Horovod is not initialised.
    """
    if is_dynamo_compiling():
        return eagerly(allgather, tensor, name, process_set)
    if profiler._is_profiler_enabled and is_outermost():
        return recorded(allgather, tensor, name, process_set)
    result: torch.Tensor = HorovodAllgather.call(tensor, name, process_set)
    return result


def grouped_allgather(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, ...]:
    """Gather several tensors of every rank as one operation and return the tuple of results.

    All are gathered or none; every rank passes the same number of tensors in the same order. Differentiable
    as one group. Each tensor, and errors, as in `allgather`; an empty group is a ValueError.
    """
    if is_dynamo_compiling():
        return eagerly(grouped_allgather, tensors, name, process_set)
    if profiler._is_profiler_enabled and is_outermost():
        return recorded(grouped_allgather, tensors, name, process_set)
    result: tuple[torch.Tensor, ...] = HorovodGroupedAllgather.call(name, process_set, *tensors)
    return result
