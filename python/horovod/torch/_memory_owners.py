"""Finds out whether a tensor is the only owner of its memory, so that an operation may write to it.

PyTorch gives views of one tensor to several parameters, and may read a gradient again after it was accumulated. A
reduction in place would change those values. So a gradient is reduced in place only if nothing else owns its memory.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

import torch

_storage_of: Callable[[torch.Tensor], torch.UntypedStorage] = torch.Tensor.untyped_storage
_address_of: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")

# False of memory that another library has allocated, such as NumPy: two storages may lie on the same bytes.
_is_pytorchs: Callable[[torch.UntypedStorage], bool] = torch.UntypedStorage.resizable


def _usable_count() -> Callable[[int], int] | None:
    """PyTorch's private query for the number of a storage's owners, by address, if it counts as expected."""
    count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
    try:
        if count is None:
            return None
        tensor = torch.empty(2, device="cpu")
        storage = _storage_of(tensor)
        counts = [count(_address_of(storage)), count(_address_of(_storage_of(tensor)))]
        view = tensor[1:]
        counts.append(count(_address_of(storage)))
        del view
        counts.append(count(_address_of(storage)))
    except (AttributeError, TypeError, RuntimeError):
        return None
    return count if counts == [_ALONE, _ALONE, _ALONE + 1, _ALONE] else None


def _holders(tensor: torch.Tensor) -> tuple[int, int]:
    """The number of what holds a tensor, in C++ and in Python."""
    return tensor._use_count(), sys.getrefcount(tensor)


def _holders_of_a_base() -> tuple[int, int] | None:
    """The holders of a base that only its view keeps, from the view; None if another holder is not counted."""
    try:
        view = torch.empty(2, 2, device="cpu").t()
        alone = _holders(view._base)  # type: ignore[arg-type]
        sibling = view.t()
        with_sibling = _holders(view._base)  # type: ignore[arg-type]
        del sibling
        base = view._base
        with_name = _holders(view._base)  # type: ignore[arg-type]
        del base
        again = _holders(view._base)  # type: ignore[arg-type]
    except (AttributeError, TypeError, RuntimeError):
        return None
    is_counted = with_sibling[0] > alone[0] and with_name[1] > alone[1] and again == alone
    return alone if is_counted else None


# Owners of a storage that has one tensor: the tensor, and the storage's Python object during the query.
_ALONE = 2

# None: every tensor counts as shared, so copies are reduced.
_count = _usable_count()

# None: a base of the tensor that is being accumulated counts as kept by something else.
_BASE_ALONE = _holders_of_a_base()


def are_alone(tensors: Sequence[torch.Tensor], passing: torch.Tensor | None = None) -> bool:
    """Whether `is_alone` is true of each tensor, with `passing` for the last one only; False if that is unknown.

    The same tensor twice is not noticed.
    """
    if _count is None:
        return False
    try:
        storages = list(map(_storage_of, tensors))
    except (NotImplementedError, RuntimeError):  # sparse
        return False
    if False in map(_is_pytorchs, storages):
        return False
    counts = list(map(_count, map(_address_of, storages)))
    alone = counts.count(_ALONE)
    if alone == len(counts) - 1 and counts[-1] != _ALONE:
        return is_alone(tensors[-1], passing)
    return alone == len(counts)


def is_alone(tensor: torch.Tensor, passing: torch.Tensor | None = None) -> bool:
    """Whether no other tensor is on this one's memory but `passing`, whose last reader has run, and its base.

    The base must have no holder but `passing`: another one may read the base again.

    A tensor without a storage of its own, such as a sparse one, counts as alone. Memory of another library does not:
    the count leaves out that library, and other tensors on the same memory.
    """
    try:
        storage = _storage_of(tensor)
    except (NotImplementedError, RuntimeError):
        return True
    if _count is None or not _is_pytorchs(storage):
        return False
    owners = _count(_address_of(storage))
    if owners == _ALONE or passing is None or passing is tensor or owners > _ALONE + 2:
        return owners == _ALONE
    # A sparse tensor has no storage.
    if passing.layout is not torch.strided or (
        _address_of(_storage_of(passing)) != _address_of(storage)
    ):
        return False
    return owners == _ALONE + 1 or _keeps_base_alone(passing)


def _keeps_base_alone(view: torch.Tensor) -> bool:
    """Whether a tensor is a view whose base has no other holder."""
    return view._base is not None and _holders(view._base) == _BASE_ALONE


class Overlaps:
    """Which of some tensors have a byte in common with another one of them, or are the same object."""

    def __init__(self, tensors: Iterable[torch.Tensor | None]) -> None:
        self._tensors = [tensor for tensor in tensors if tensor is not None]
        self._repeated = {
            key for key, number in Counter(map(id, self._tensors)).items() if number > 1
        }
        self._overlapping: set[int] | None = None

    def is_repeated(self, tensor: torch.Tensor) -> bool:
        """Whether the very same tensor is there twice."""
        return id(tensor) in self._repeated

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor has a byte in common with another one, or is there twice."""
        if self._overlapping is None:
            self._overlapping = _overlapping(self._tensors) | self._repeated
        return id(tensor) in self._overlapping


def _overlapping(tensors: Iterable[torch.Tensor]) -> set[int]:
    spans = sorted(_span(tensor) for tensor in tensors if _has_memory(tensor))
    found: set[int] = set()
    furthest = ("", 0, 0, 0)  # the earlier span with the largest end
    for span in spans:
        device, start, end, key = span
        if device == furthest[0] and start < furthest[2]:
            found.update((furthest[3], key))
        if device != furthest[0] or end > furthest[2]:
            furthest = span
    return found


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.numel() > 0


def _span(tensor: torch.Tensor) -> tuple[str, int, int, int]:
    """Device, begin and end of a tensor's memory, and the tensor's id."""
    start = tensor.data_ptr()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((length - 1) * stride for length, stride in steps)
    return str(tensor.device), start, start + (last + 1) * tensor.element_size(), id(tensor)
