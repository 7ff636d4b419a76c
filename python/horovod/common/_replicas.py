"""Reports the parameters of optimizers, so that rank 0 finds ranks that begin to train with different ones.

Each rank reads its parameters once, before an update by a reduced step, and sends checksums to rank 0. No rank waits
for another. `HOROVOD_CHECK_REPLICAS` sets what a difference leads to; see docs/replicas.md.
"""

from __future__ import annotations

import enum
import hashlib
import math
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

from horovod import _core
from horovod.common._job_events import remember_until_job_ends
from horovod.common.process_sets import ProcessSet, global_process_set

Shape: TypeAlias = tuple[str, Sequence[int], int]
"""Name of the type, shape, and bytes of an element."""

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)

# Parameters of so many bytes in all are read from end to end; of each of larger ones the first and the last block.
_WHOLE_BYTES_MAX = 64 << 20
_BLOCK_BYTES = 32 << 10


class PairedBy(enum.Enum):
    """How the parameters of two ranks are paired."""

    NAME = "name"
    POSITION = "position"
    """A name has a count of all layers that the process has made. Ranks may have made different numbers of layers."""


class Readable(Protocol[T_contra]):
    """How a framework's tensors are read."""

    def shape_of(self, tensor: T_contra) -> Shape: ...

    def checksum(self, tensor: T_contra, parts: Sequence[slice]) -> int:
        """Of the elements in these parts of the flat tensor, in logical order."""
        ...


class Noted:
    """Parameters that are not read here: the value of `shape_of`, and a checksum."""

    def shape_of(self, tensor: tuple[Shape, int]) -> Shape:
        return tensor[0]

    def checksum(self, tensor: tuple[Shape, int], parts: Sequence[slice]) -> int:
        del parts
        return tensor[1]


class FirstStep:
    """Decides once in every generation that parameters are to be reported: before an optimizer's first reduced step.

    `after` steps come first, where scripts broadcast after these.
    """

    def __init__(self, process_set: ProcessSet, after: int = 0) -> None:
        self._process_set = process_set
        self._after = after
        self._hvd_forget_job()
        remember_until_job_ends(self)

    def _hvd_forget_job(self) -> None:
        self._left = self._after + 1

    def _hvd_note_join(self) -> None:
        """Report no more: a rank that joined early has taken fewer steps than others, so its first ones come later."""
        self._left = 0

    @property
    def is_open(self) -> bool:
        """Whether a report of this generation is still to come."""
        return self._left > 0

    def is_due(self) -> bool:
        """Count a step; whether `report` is to follow before its update."""
        if not self._left:
            return False
        self._left -= 1
        return not self._left and _core.checks_replicas(self._process_set.process_set_id)


def report(
    named: Sequence[tuple[str, T]],
    arrays: Readable[T],
    process_set: ProcessSet,
    advice: str,
    paired_by: PairedBy = PairedBy.POSITION,
) -> None:
    """Report parameters, in an order that is the same on every rank.

    `advice` is a sentence on how to make them equal.
    """
    if not named or process_set.process_set_id is None:
        return
    shapes = [arrays.shape_of(tensor) for _, tensor in named]
    key = hashlib.blake2b(digest_size=8)
    sums = []
    for (name, tensor), shape, parts in zip(named, shapes, parts_of(shapes), strict=True):
        paired = name if paired_by is PairedBy.NAME else ""
        key.update(f"{paired}\n{shape[0]} {tuple(shape[1])}\n".encode("utf-8", "replace"))
        sums.append(arrays.checksum(tensor, parts))
    names = [name for name, _ in named]
    number = int.from_bytes(key.digest(), "little")
    _core.report_replica(process_set.process_set_id, number, names, sums, advice)


def limits() -> tuple[int, int]:
    """Bytes of parameters that are read from end to end, and of a block of larger ones."""
    return _WHOLE_BYTES_MAX, _BLOCK_BYTES


def arguments(process_set: ProcessSet) -> str:
    """The last arguments of the call that makes the ranks equal, as an advice names them."""
    root = (process_set.ranks or [0])[0]
    return f"root_rank={root}" + ("" if process_set is global_process_set else ", process_set=...")


def parts_of(shapes: Sequence[Shape]) -> list[list[slice]]:
    """The elements that are read of each parameter of a model."""
    sizes = [math.prod(map(int, shape)) for _, shape, _ in shapes]
    total = sum(size * width for size, (_, _, width) in zip(sizes, shapes, strict=True))
    return [_parts(size, shape[2], total) for size, shape in zip(sizes, shapes, strict=True)]


def is_difference(text: str) -> bool:
    """Whether this is the text of an error about replicas that differ, maybe with a framework's own around it."""
    return "do not hold the same values" in text


def checksum_of(arrays: Sequence[Any]) -> int:
    """Checksum of the elements of NumPy arrays, one array after the other."""
    import numpy as np

    pieces = [np.ascontiguousarray(array).reshape(-1) for array in arrays]
    whole = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    # Types that NumPy does not know by itself, such as bfloat16, have no interface to their memory.
    data = whole.view(np.uint8)
    [checksum] = _core.checksums([(data.__array_interface__["data"][0], data.nbytes)])
    return checksum


def _parts(elements: int, width: int, total: int) -> list[slice]:
    block = max(1, _BLOCK_BYTES // width)
    if total <= _WHOLE_BYTES_MAX or elements <= 2 * block:
        return [slice(0, elements)]
    return [slice(0, block), slice(elements - block, elements)]
