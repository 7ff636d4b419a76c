"""Broadcast: give every rank the tensor of one of them."""

from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from horovod import _core
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch._allreduce import allreduce
from horovod.torch._autograd import Collective
from horovod.torch._handles import eagerly, synchronize
from horovod.torch._profiling import is_outermost, profiler, recorded
from horovod.torch._tensors import broadcast_plain, broadcast_plain_and_wait, collectives


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start a `broadcast` into a new tensor and return its handle for `poll` and `synchronize`.

    Not differentiable. The input must not be changed before `synchronize`.
    """
    if is_dynamo_compiling():
        return eagerly(broadcast_async, tensor, root_rank, name, process_set)
    if profiler._is_profiler_enabled and is_outermost():
        return recorded(broadcast_async, tensor, root_rank, name, process_set)
    return collectives.broadcast_async(tensor, root_rank, name, process_set)


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an in-place `broadcast_` and return its handle for `poll` and `synchronize`.

    The tensor must not be touched before `synchronize`, which also is what writes the result into a tensor
    that is not dense.
    """
    if is_dynamo_compiling():
        return eagerly(broadcast_async_, tensor, root_rank, name, process_set)
    if profiler._is_profiler_enabled and is_outermost():
        return recorded(broadcast_async_, tensor, root_rank, name, process_set)
    plain = broadcast_plain(tensor, root_rank, name, process_set.process_set_id)
    if plain is not None:
        return plain
    return collectives.broadcast_async_(tensor, root_rank, name, process_set)


class HorovodBroadcast(Collective):
    """Differentiable broadcast; the gradient is the averaged one on the root and zeros elsewhere."""

    @staticmethod
    def run(
        tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> torch.Tensor:
        """Broadcast into a new tensor."""
        result: torch.Tensor = synchronize(broadcast_async(tensor, root_rank, name, process_set))
        return result

    @staticmethod
    def remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        """Keep whose tensor it was."""
        _, ctx.root_rank, _, ctx.process_set = inputs

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        """Average the gradient; it belongs to the root."""
        averaged = allreduce(grad_output, average=True, process_set=ctx.process_set)
        if _core.rank() != ctx.root_rank:
            # Not a fresh tensor of zeros: a second backward has to come through here on every rank.
            averaged = averaged.masked_fill(averaged.new_ones((), dtype=torch.bool), 0)
        return averaged, None, None, None


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return the root's tensor on every rank, as a new tensor.

    Differentiable: the root's gradient is the *average* of the incoming gradients, as scripts expect it (a sum
    would be the derivative), the others' is zero; every member has to run its backward pass.

    Parameters
    ----------
    tensor
        Any shape and dtype, the same on every rank; values matter on the root only. Not modified.
    root_rank
        Global rank of the root, with a process set too.
    name
        Pairs the call across ranks. Without one, all ranks must issue their unnamed calls in the same order.
    process_set
        The ranks that take part.

    Raises
    ------
    ValueError
        Unsupported device or layout on this rank, a name that is still in flight, not a member, or the root is
        no member; nothing was sent.
    HorovodInternalError
        Ranks disagree (the message names the tensor and both values), a member was lost, or Horovod is not
        initialised.
    """
    if is_dynamo_compiling():
        return eagerly(broadcast, tensor, root_rank, name, process_set)
    if profiler._is_profiler_enabled and is_outermost():
        return recorded(broadcast, tensor, root_rank, name, process_set)
    result: torch.Tensor = HorovodBroadcast.call(tensor, root_rank, name, process_set)
    return result


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Replace each rank's tensor by the root's, in place, and return it.

    Autograd does not see the change; leaves that require gradients may be passed. Dense tensors are worked on where
    they are if they have the same order of strides on all ranks (contiguous, channels-last, transposed); others as a
    copy, written back. Parameters and errors as in `broadcast`.
    """
    if not is_dynamo_compiling():
        if profiler._is_profiler_enabled and is_outermost():
            return recorded(broadcast_, tensor, root_rank, name, process_set)
        done: torch.Tensor | None = broadcast_plain_and_wait(
            tensor, root_rank, name, process_set.process_set_id
        )
        if done is not None:
            return done
    result: torch.Tensor = synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return result
