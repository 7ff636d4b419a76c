"""Handing operations to the core: the one caller of `_core.enqueue`."""

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from horovod import _core
from horovod.common._ops import Sum

# One tensor: input pointer, output pointer (0: the core allocates), dtype code, shape, owner of the memory.
Entry = tuple[int, int, int, Sequence[int], Any]

# Memory without an array: its address, and what keeps it alive.
Allocation = tuple[int, Any]

# Gives memory for a result of the shape whose size is known only when all ranks have told theirs.
Allocate = Callable[[tuple[int, ...]], Allocation]

# A result whose size was known late: memory and shape. The memory is the core's own, or of a GPU's result what the
# function that was given to allocate it has returned to keep it alive.
Output = tuple[Any, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as one framework knows it."""

    streams: _core.Streams
    """Tells the framework's current stream."""
    ordinal: int
    """Its number in this process, as CUDA counts."""
    allocator: Callable[[Any], Allocate]
    """Given what keeps an operand alive: memory of the same type, for what then runs on the present stream."""

    def __str__(self) -> str:
        return f"cuda:{self.ordinal}"


def later_sharers(spans: Sequence[tuple[int, int]]) -> list[int]:
    """Which of these ranges of addresses have bytes in common with an earlier one.

    They cannot be reduced in place beside it: the operand of one would be the result of the other.
    """
    ordered = sorted(spans)
    if all(before[1] <= after[0] for before, after in pairwise(ordered)):
        return []
    later = []
    for i, (start, end) in enumerate(spans):
        if any(max(start, span[0]) < min(end, span[1]) for span in spans[:i]):
            later.append(i)
    return later


def checked_root(root_rank: Any) -> int:
    """The root rank of a broadcast as an integer from 0; `ValueError` where the argument is none."""
    try:
        root = operator.index(root_rank)
    except TypeError:
        root = -1
    if root < 0:
        raise ValueError(
            f"broadcast received invalid root rank {root_rank!r} for provided process set: it is the rank in the whole "
            "job, a Python integer from 0"
        )
    return root


def start(
    kind: int,
    prefix: str,
    name: str | None,
    entries: Sequence[Entry],
    process_set_id: int | None,
    *,
    op: int = Sum,
    prescale: float = 1.0,
    postscale: float = 1.0,
    root_rank: int = -1,
    splits: Sequence[int] | None = None,
    finish: Callable[[Any], Any] | None = None,
    gpu: Gpu | None = None,
    allocators: Sequence[Allocate] | None = None,
) -> int:
    """Queue an operation and return its handle.

    `_core.wait` will return what `finish` makes of the outputs: for each entry an `Output`, or None where the caller
    gave the memory; for alltoall with the received splits, `(outputs, splits)`. With a `gpu` all addresses are of its
    memory, and there are `allocators`, one for each entry, where the results' sizes are known late.
    """
    return _core.enqueue(
        (prefix, name, process_set_id),  # a set that is not registered, None, is a ValueError
        (kind, op, prescale, postscale, root_rank, splits),
        entries,
        finish,
        None if gpu is None else (gpu.streams, gpu.ordinal, allocators),
    )


def complete_all(completions: Iterable[Callable[[], object]]) -> None:
    """Call what waits for each of several operations, and only then raise what failed first.

    Until all have ended they write into memory, which nobody may touch before.
    """
    failure = None
    for complete in completions:
        try:
            complete()
        except RuntimeError as error:
            failure = failure or error
    if failure is not None:
        raise failure


def wait_for_all(handles: Iterable[int]) -> None:
    """Wait for several operations whose results are already where they belong."""
    complete_all([partial(_core.wait, handle) for handle in handles])
