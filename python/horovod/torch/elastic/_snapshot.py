"""Snapshots of state dicts: copied into memory that is allocated once; where allowed, in the background."""

from __future__ import annotations

import copy
import ctypes
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

# Smaller tensors are copied at once: that takes less than handing them over.
_DEFERRED_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Deferred:
    """One tensor that is still to be copied."""

    target: torch.Tensor
    source: torch.Tensor
    version: int
    name: str


class Snapshot:
    """One state dict as it was at some moment: a complete copy, and the memory in which the next one is made."""

    def __init__(self) -> None:
        self._complete: Any = None
        self._written: Any = None

    def take(self, tree: Any, may_wait: Callable[[str, torch.Tensor], bool]) -> list[Deferred]:
        """Copy a state dict, but for the tensors that may wait; those are returned. `complete` ends it."""
        deferred: list[Deferred] = []

        def into(name: str, source: torch.Tensor, target: torch.Tensor) -> None:
            if (
                source.nbytes >= _DEFERRED_BYTES
                and may_wait(name, source)
                and _same(source, target)
            ):
                deferred.append(Deferred(target, source, source._version, name))
            else:
                target.copy_(source)

        self._written = _copied(tree, self._written, into, "")
        return deferred

    def complete(self) -> None:
        """Make the copy that was just written the one that counts; the other's memory is used for the next."""
        self._complete, self._written = self._written, self._complete

    def value(self) -> Any:
        """The state dict, as tensors and objects of its own: whoever loads it may keep them."""
        return _copied(self._complete, None, lambda _, source, target: target.copy_(source), "")


class Copier:
    """Copies tensors in a thread of its own, one batch at a time."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._running: tuple[Future[None], list[Deferred], Callable[[], None]] | None = None

    def start(self, deferred: list[Deferred], done: Callable[[], None]) -> None:
        """Begin to copy; `done` is called by the `finish` that follows."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="horovod-commit")
        self._running = (self._thread.submit(_copy_all, deferred), deferred, done)

    def finish(self) -> None:
        """Wait for the copies that were begun.

        Raises
        ------
        RuntimeError
            A tensor was changed meanwhile.
        """
        if self._running is None:
            return
        (future, deferred, done), self._running = self._running, None
        future.result()
        for entry in deferred:
            if entry.source._version != entry.version:
                raise RuntimeError(
                    f"{entry.name} was changed while commit() was saving it in the background. With "
                    "commit_in_background, only optimizer.step() may change parameters and optimizer state between "
                    "a commit and the next step; change them before the commit, or turn commit_in_background off."
                )
        done()


def _copy_all(deferred: Sequence[Deferred]) -> None:
    # Not Tensor.copy_: it would start a second set of compute threads for this thread. This one lets others run, too.
    for entry in deferred:
        ctypes.memmove(entry.target.data_ptr(), entry.source.data_ptr(), entry.source.nbytes)


def _copied(
    value: Any,
    reused: Any,
    into: Callable[[str, torch.Tensor, torch.Tensor], object],
    name: str,
) -> Any:
    """Copy nested dicts, lists and tuples of tensors and objects, into the tensors of `reused` where they fit."""
    if isinstance(value, torch.Tensor):
        if (
            type(value) not in (torch.Tensor, torch.nn.Parameter)
            or value.layout is not torch.strided
        ):
            return value.detach().clone()
        source = value.detach()
        fits = isinstance(reused, torch.Tensor) and (reused.shape, reused.dtype) == (
            source.shape,
            source.dtype,
        )
        target = reused if fits else torch.empty_like(source, device="cpu")
        into(name, source, target)
        return target
    kind = type(value)
    if kind is dict or kind is OrderedDict:
        known = reused if type(reused) is kind else {}
        result = copy.copy(value)  # a module's state dict carries versions as an attribute
        for key, item in value.items():
            result[key] = _copied(item, known.get(key), into, f"{name}.{key}" if name else str(key))
        return result
    if kind is list or kind is tuple:
        parts = (
            reused if type(reused) is kind and len(reused) == len(value) else [None] * len(value)
        )
        return kind(
            _copied(v, p, into, f"{name}.{i}")
            for i, (v, p) in enumerate(zip(value, parts, strict=True))
        )
    return copy.deepcopy(value)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether one `memmove` copies the one into the other."""
    return a.is_cpu and a.is_contiguous() and b.is_contiguous()
