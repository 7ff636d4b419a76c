"""Alltoall: every rank sends some of its rows to each other rank."""

from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch._autograd import Collective
from horovod.torch._handles import eagerly, synchronize
from horovod.torch._profiling import is_outermost, profiler, recorded
from horovod.torch._tensors import Splits, collectives


def alltoall_async(
    tensor: torch.Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an `alltoall` and return its handle; `synchronize` gives `(output, received_splits)` in any case.

    Not differentiable. The input must not be changed before `synchronize`.
    """
    if is_dynamo_compiling():
        return eagerly(alltoall_async, tensor, splits, name, process_set)
    if profiler._is_profiler_enabled and is_outermost():
        return recorded(alltoall_async, tensor, splits, name, process_set)
    return collectives.alltoall_async(tensor, splits, name, process_set)


class HorovodAlltoall(Collective):
    """Differentiable alltoall; the gradient's rows travel back to where the rows came from."""

    by_rows = True

    @staticmethod
    def run(
        tensor: torch.Tensor, splits: Splits, name: str | None, process_set: ProcessSet
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Exchange rows into a new tensor."""
        # Numbers that are on a GPU are read once: each time the host waits for it.
        numbers = splits.cpu() if isinstance(splits, torch.Tensor) else splits
        output, received = synchronize(alltoall_async(tensor, numbers, name, process_set))
        return output, received

    @staticmethod
    def remember(
        ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """Keep how many rows were sent and received."""
        tensor, _, _, ctx.process_set = inputs
        ctx.rows = tensor.shape[0]
        _, received = output
        ctx.received = received.tolist()
        ctx.mark_non_differentiable(received)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        """Send the rows back; rows that were not sent get zeros."""
        grad, _ = HorovodAlltoall.call(grad_outputs[0], ctx.received, None, ctx.process_set)
        missing = ctx.rows - grad.shape[0]
        if missing:
            grad = torch.cat([grad, grad.new_zeros((missing, *grad.shape[1:]))])
        return grad, None, None, None


def alltoall(
    tensor: torch.Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Send rows of the tensor to every rank and return the rows received, ordered by sender.

    Differentiable: the gradient's rows travel back; every member has to run its backward pass.

    Parameters
    ----------
    tensor
        At least one dimension. Dimensions but the first, and the dtype, are the same on every rank. Any dtype.
        Not modified.
    splits
        How many rows go to each member, in the order of ranks: a list, or a tensor of int32 or int64. Rows
        beyond their sum are not sent. Without it, the same number of rows goes to every member.
    name
        Pairs the call across ranks. Without one, all ranks must issue their unnamed calls in the same order.
    process_set
        The ranks that take part.

    Returns
    -------
    torch.Tensor or tuple
        The received rows; with `splits`, a pair of them and an int32 tensor of how many each member sent,
        on the device of `splits`.

    Raises
    ------
    ValueError
        `splits` is not one-dimensional, not integer, negative, of another length than the set, or sums to
        more than the first dimension; it is missing and the first dimension is not a multiple of the set's
        size; or as in `allgather`. Nothing was sent.
    HorovodInternalError
        As in `allgather`.
    """
    if is_dynamo_compiling():
        return eagerly(alltoall, tensor, splits, name, process_set)
    if profiler._is_profiler_enabled and is_outermost():
        return recorded(alltoall, tensor, splits, name, process_set)
    output: torch.Tensor
    output, received = HorovodAlltoall.call(tensor, splits, name, process_set)
    if isinstance(splits, torch.Tensor):
        received = received.to(splits.device)
    return output if splits is None else (output, received)
