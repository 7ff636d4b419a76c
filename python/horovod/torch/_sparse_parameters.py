"""Broadcast of a model's sparse tensors: the root describes them, and the dense tensors in them travel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from horovod.common._objects import broadcast_object
from horovod.common._operations import wait_for_all
from horovod.common.process_sets import ProcessSet
from horovod.torch._broadcast import broadcast_async_

# The parts of a sparse tensor, by its layout: the places of its values, then the values.
_PARTS: dict[torch.layout, tuple[str, ...]] = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


@dataclass(frozen=True, slots=True)
class _Description:
    """A sparse tensor without its elements."""

    layout: torch.layout
    dtype: torch.dtype
    shape: tuple[int, ...]
    is_coalesced: bool
    parts: tuple[tuple[torch.dtype, tuple[int, ...]], ...]

    def whole(self) -> tuple[torch.layout, torch.dtype, tuple[int, ...]]:
        """The part that has to be the same on every rank."""
        return self.layout, self.dtype, self.shape


def is_sparse(tensor: torch.Tensor) -> bool:
    """Whether a tensor has one of the layouts that consist of dense tensors."""
    return tensor.layout in _PARTS


def broadcast_sparse(
    named: Sequence[tuple[str | None, torch.Tensor]], root_rank: int, process_set: ProcessSet
) -> list[str | None]:
    """Give sparse tensors the root's values, and return the names of COO ones that had another number of entries here.

    Such a tensor gets other memory, which other tensors that shared its old one do not see: the model's buffer, where
    this is an entry of `model.state_dict()`.

    Raises
    ------
    ValueError
        A tensor has another layout, dtype or shape than the root's, or there is another number of them; raised where
        they differ, after the exchange.
    """
    prefix = "broadcast_parameters.sparse"
    own = [_described(tensor) for _, tensor in named]
    roots: list[_Description] = broadcast_object(own, root_rank, prefix, process_set)
    if len(own) == len(roots):
        arriving = [
            _parts(tensor) if here == there else _empty(there, tensor.device)
            for (_, tensor), here, there in zip(named, own, roots, strict=True)
        ]
    else:
        # The root sends all the same.
        arriving = [_empty(there, torch.device("cpu")) for there in roots]
    wait_for_all(
        [
            broadcast_async_(part, root_rank, f"{prefix}.{i}.{j}", process_set)
            for i, parts in enumerate(arriving)
            for j, part in enumerate(parts)
        ]
    )
    if len(own) != len(roots):
        raise ValueError(
            f"broadcast_parameters: there are {len(own)} sparse tensors on this rank and {len(roots)} on rank "
            f"{root_rank}. Build the same model on all ranks."
        )
    renewed = []
    for (name, tensor), here, there, parts in zip(named, own, roots, arriving, strict=True):
        if here.whole() != there.whole():
            raise ValueError(
                f"broadcast_parameters: {name or 'a tensor'!r} is {_text(here)} on this rank and {_text(there)} "
                f"on rank {root_rank}. Build the same model on all ranks."
            )
        if here != there:
            _replace(tensor, _assembled(there, parts))
            if tensor.layout is torch.sparse_coo:
                renewed.append(name)
    return renewed


def _described(tensor: torch.Tensor) -> _Description:
    parts = tuple((part.dtype, tuple(part.shape)) for part in _parts(tensor))
    is_coalesced = tensor.layout is torch.sparse_coo and tensor.is_coalesced()
    return _Description(tensor.layout, tensor.dtype, tuple(tensor.shape), is_coalesced, parts)


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The dense tensors themselves, not copies."""
    own = tensor.detach()
    return [getattr(own, part)() for part in _PARTS[tensor.layout]]


def _empty(description: _Description, device: torch.device) -> list[torch.Tensor]:
    return [torch.empty(shape, dtype=dtype, device=device) for dtype, shape in description.parts]


def _assembled(description: _Description, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    # PyTorch's own types know these arguments as tensors and shape only where each is written out.
    is_coo = description.layout is torch.sparse_coo
    make: Any = torch.sparse_coo_tensor if is_coo else torch.sparse_compressed_tensor
    options = {} if is_coo else {"layout": description.layout}
    assembled: torch.Tensor = make(*parts, description.shape, check_invariants=False, **options)
    if is_coo:
        assembled._coalesced_(description.is_coalesced)
    return assembled


def _replace(tensor: torch.Tensor, value: torch.Tensor) -> None:
    with torch.no_grad():
        if tensor.layout is not torch.sparse_coo:
            tensor.resize_as_sparse_(value)
        tensor.copy_(value)


def _text(description: _Description) -> str:
    return f"{description.layout} of {description.dtype} and shape {description.shape}"
