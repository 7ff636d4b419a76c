"""Bringing all ranks to the root's state: parameters, optimizer state and Python objects."""

import warnings
from typing import Any

import torch

from horovod.common._objects import allgather_object, broadcast_object
from horovod.common._operations import wait_for_all
from horovod.common._parameters import named_values
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch._broadcast import broadcast_async_
from horovod.torch._memory_owners import Overlaps
from horovod.torch._optimizer_state import broadcast_optimizer_state
from horovod.torch._sparse_parameters import broadcast_sparse, is_sparse
from horovod.torch._tensors import same_bits

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]


def broadcast_parameters(
    params: Any, root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Replace tensors on every rank by the root's, in place; typically right after building the model.

    Parameters
    ----------
    params
        `model.state_dict()`, `model.named_parameters()`, or any dict, or iterable of `(name, tensor)` pairs or
        of tensors. The same names (or the same order), shapes and dtypes on every rank. Tensors need not be
        contiguous and may have any dtype. In a dict, values that are no tensors (extra state of modules) are
        replaced by the root's, pickled; load the dict into the model then. None is skipped. Sparse tensors
        are replaced, too; where a COO tensor of the root has another number of entries, load the dict then (a warning
        says so).
    root_rank
        Global rank whose values are used.
    process_set
        The ranks that take part.

    Raises
    ------
    ValueError
        `params` is none of the above; or entries share memory on this rank, and the root's values for them differ;
        or a sparse tensor has another layout, dtype or shape than the root's.
    HorovodInternalError
        Shapes or dtypes differ between ranks, or a rank was lost.

    Examples
    --------
    >>> hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    """
    renewed = replace_parameters(params, root_rank, process_set)
    if renewed and isinstance(params, dict):
        warnings.warn(
            f"broadcast_parameters: the sparse {renewed[0]!r} has another number of entries on rank {root_rank}, so it "
            "could not be replaced inside the model. The dict has the new tensor: call "
            "model.load_state_dict(...) with it.",
            UserWarning,
            stacklevel=2,
        )


def replace_parameters(params: Any, root_rank: int, process_set: ProcessSet) -> list[str | None]:
    """As `broadcast_parameters`; return the names of sparse tensors that got other memory."""
    tensors, objects = named_values(params, torch.Tensor, torch.nn.Module)
    sparse = [(name, tensor) for name, tensor in tensors if is_sparse(tensor)]
    tensors = [(name, tensor) for name, tensor in tensors if not is_sparse(tensor)]
    overlaps = Overlaps(tensor for _, tensor in tensors)
    # Entries that share memory are received into copies, to compare the root's values for them.
    arriving = [
        (name, tensor, tensor.detach().clone() if overlaps.has(tensor) else tensor)
        for name, tensor in tensors
    ]
    handles = [broadcast_async_(into, root_rank, name, process_set) for name, _, into in arriving]
    if objects:
        params.update(
            broadcast_object(objects, root_rank, "broadcast_parameters.objects", process_set)
        )
    wait_for_all(handles)
    renewed = broadcast_sparse(sparse, root_rank, process_set) if sparse else []
    apart = [(name, tensor, into) for name, tensor, into in arriving if into is not tensor]
    with torch.no_grad():
        for _, tensor, into in apart:
            tensor.data.copy_(into)
    for name, tensor, into in apart:
        if not same_bits(tensor, into):
            raise ValueError(
                f"broadcast_parameters: {name or 'a tensor'!r} shares memory with another entry on this rank, and "
                f"rank {root_rank} has different values for the two. Share (tie) the same parameters on all ranks."
            )
    return renewed
