"""Reports the parameters of optimizers, so that rank 0 finds ranks that begin to train with different ones.

Each rank reads its parameters once, before their first update by a reduced step, and sends checksums to rank 0. No rank
waits for another. `HOROVOD_CHECK_REPLICAS` says what a difference is; see docs/running.md.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from horovod import _core
from horovod.common._job_events import remember_until_job_ends
from horovod.common.process_sets import ProcessSet

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)

# Parameters of so many bytes in all are read from end to end; of each of larger ones the first and the last block.
_WHOLE_BYTES_MAX = 64 << 20
_BLOCK_BYTES = 32 << 10


class Readable(Protocol[T_contra]):
    """How a framework's tensors are read."""

    def shape_of(self, tensor: T_contra) -> tuple[str, Sequence[int], int]:
        """Name of the type, shape, and bytes of an element."""
        ...

    def checksum(self, tensor: T_contra, parts: Sequence[slice]) -> int:
        """Of the elements in these parts of the flat tensor, in logical order."""
        ...


class FirstStep:
    """Tells once in every generation that parameters are to be reported: before an optimizer's first reduced step.

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
        """Nothing to do: who has joined does not report, and is not waited for."""

    def is_due(self) -> bool:
        """Count a step; whether `report` is to follow before its update."""
        if not self._left:
            return False
        self._left -= 1
        return not self._left and _core.checks_replicas(self._process_set.process_set_id)


def report(
    named: Iterable[tuple[str, T]], arrays: Readable[T], process_set: ProcessSet, advice: str
) -> None:
    """Report parameters, whose names are the same on every rank; `advice` is a sentence on how to make them equal."""
    ordered = sorted(named, key=lambda entry: entry[0])
    shapes = [arrays.shape_of(tensor) for _, tensor in ordered]
    if not ordered or process_set.process_set_id is None:
        return
    sizes = [_elements(shape) for _, shape, _ in shapes]
    total = sum(size * width for size, (_, _, width) in zip(sizes, shapes, strict=True))
    key = hashlib.blake2b(digest_size=8)
    sums = []
    for (name, tensor), (kind, shape, width), size in zip(ordered, shapes, sizes, strict=True):
        text = f"{name}\n{kind} {tuple(shape)}\n"
        key.update(text.encode("utf-8", "replace"))
        sums.append(arrays.checksum(tensor, _parts(size, width, total)))
    names = [name for name, _ in ordered]
    number = int.from_bytes(key.digest(), "little")
    _core.report_replica(process_set.process_set_id, number, names, sums, advice)


def _elements(shape: Sequence[int]) -> int:
    elements = 1
    for dimension in shape:
        elements *= int(dimension)
    return elements


def _parts(elements: int, width: int, total: int) -> list[slice]:
    block = max(1, _BLOCK_BYTES // width)
    if total <= _WHOLE_BYTES_MAX or elements <= 2 * block:
        return [slice(0, elements)]
    return [slice(0, block), slice(elements - block, elements)]
