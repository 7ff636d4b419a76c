"""Allreduce of sparse tensors: gather everybody's entries, and let duplicates add up."""

from collections.abc import Callable

import torch

from horovod.common._dtypes import OP_NAMES
from horovod.common._ops import Average, Sum, resolve_op
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch._allgather import allgather_async
from horovod.torch._handles import synchronize
from horovod.torch._profiling import is_outermost, profiler, recorded
from horovod.torch._tensors import check_summable, type_name


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None,
    op: int | str,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], torch.Tensor]:
    """Start the sum or average of a sparse tensor over the ranks, and return a function that waits for it.

    Two gathers run, named `<name>.indices` and `<name>.values`. Calling the returned function once gives an
    uncoalesced sparse tensor of the same size, in which entries of several ranks at one place add up; the average of
    integers is coalesced.

    Parameters
    ----------
    tensor
        Sparse COO, the same size on every rank; the number of entries may differ and be 0. A dtype that can be summed.
        On a GPU its entries travel as they are; on the CPU those at one place are summed first.
    name
        Pairs the call across ranks.
    op
        `Sum`, or `Average`, which divides by the number of members, the sums of integers toward zero.
    process_set
        The ranks that take part.

    Raises
    ------
    ValueError
        Not a sparse COO tensor, another operator, or as in `allgather`; nothing was sent.
    HorovodInternalError
        As in `allgather`; raised by the returned function.
    """
    if profiler._is_profiler_enabled and is_outermost():
        return recorded(sparse_allreduce_async, tensor, name, op, process_set)
    return start(tensor, name, op, process_set)[1]


def start(
    tensor: torch.Tensor, name: str | None, op: int | str, process_set: ProcessSet
) -> tuple[list[int], Callable[[], torch.Tensor]]:
    """As `sparse_allreduce_async`, with the handles of the two gathers."""
    if tensor.layout is not torch.sparse_coo:
        raise ValueError(
            f"Tensor type {type_name(tensor)} is not supported: not a sparse COO tensor."
        )
    op = resolve_op(op, None)
    if op not in (Average, Sum):
        raise ValueError(
            f"op {OP_NAMES.get(op, op)} is not supported for sparse tensors, whose entries are summed: use Sum or "
            "Average, or tensor.to_dense()."
        )
    check_summable(tensor, op)
    size = tensor.size()
    own = tensor.detach()
    if own.is_cpu:  # on a GPU the host would wait to learn how many entries are left
        own = own.coalesce()
    # Gathering goes along the first dimension, so each entry's position has to be one row. A tensor that is not
    # coalesced has these names for its entries only.
    positions = own._indices().t()
    values_handle = allgather_async(own._values(), _suffixed(name, "values"), process_set)
    indices_handle = allgather_async(positions, _suffixed(name, "indices"), process_set)

    def wait() -> torch.Tensor:
        values: torch.Tensor = synchronize(values_handle)
        indices: torch.Tensor = synchronize(indices_handle)
        members = process_set.size() or 1
        is_rounded = not (values.is_floating_point() or values.is_complex())
        if op == Average and not is_rounded:
            values = values / members
        result = torch.sparse_coo_tensor(
            indices.t(), values, size, device=values.device, check_invariants=False
        )
        if op == Average and is_rounded:
            # As of dense tensors: the sum is rounded, not each rank's part of it.
            result = result.coalesce()
            result.values().copy_(result.values().div(members, rounding_mode="trunc"))
        return result

    return [values_handle, indices_handle], wait


def _suffixed(name: str | None, what: str) -> str | None:
    return f"{name}.{what}" if name else None
