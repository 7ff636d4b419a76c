"""Counts the time that a measured script waits for its input: what it marks itself, and the waits in known loaders.

A known loader is a class whose iterators the training thread asks for batches. The class of such an iterator gets
another `__next__`, which calls the former one and counts the time. Nothing is changed in a job that is not measured.
"""

import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

from horovod import _core

# Modules and the paths of their loaders. Only what the script has imported before `init` is counted.
_LOADERS = (("torch.utils.data", "DataLoader"), ("tensorflow", "data.Dataset"))

# The thread that has called `init`. Threads that read ahead are no loss of time.
_training_thread: int | None = None
# Whether that thread waits: of waits that contain one another the outer one is counted.
_is_waiting = False
_counted_iterators: set[type] = set()


def job_begins() -> None:
    """Count the waits of this thread from now on, if the job is measured."""
    global _training_thread, _is_waiting
    _is_waiting = False
    _training_thread = None if _core.stats() is None else threading.get_ident()
    if _training_thread is not None:
        for module, path in _LOADERS:
            # A module that is not imported completely may lack the name.
            with contextlib.suppress(AttributeError, KeyError):
                _count_iterators_of(attrgetter(path)(sys.modules[module]))


def _leave_to_parent() -> None:
    """In a forked child, such as the worker of a loader: its waits are not the training's."""
    global _training_thread
    _training_thread = None


os.register_at_fork(after_in_child=_leave_to_parent)


@contextlib.contextmanager
def counted() -> Iterator[None]:
    """Count the time of the block, unless it is a part of another wait of the training thread."""
    global _is_waiting
    is_training = threading.get_ident() == _training_thread
    if is_training and _is_waiting:
        yield
        return
    if is_training:
        _is_waiting = True
    begin = time.monotonic()
    try:
        yield
    finally:
        if is_training:
            _is_waiting = False
        _core.mark_input(time.monotonic() - begin)


@functools.cache
def _count_iterators_of(loader: type) -> None:
    make: Callable[[Any], Any] = loader.__iter__  # type: ignore[attr-defined]

    @functools.wraps(make)
    def __iter__(self: Any) -> Any:
        iterator = make(self)
        kind = type(iterator)
        # Subclasses share the method that was replaced first.
        if _counted_iterators.isdisjoint(kind.__mro__):
            _counted_iterators.add(kind)
            # Types of the interpreter, such as generators, cannot be changed.
            with contextlib.suppress(AttributeError, TypeError):
                kind.__next__ = _counting(kind.__next__)
        return iterator

    loader.__iter__ = __iter__  # type: ignore[attr-defined]


def _counting(next_batch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(next_batch)
    def __next__(self: Any) -> Any:
        global _is_waiting
        if threading.get_ident() != _training_thread or _is_waiting:
            return next_batch(self)
        _is_waiting = True
        begin = time.monotonic()
        try:
            return next_batch(self)
        finally:
            _is_waiting = False
            try:  # noqa: SIM105 - `contextlib.suppress` takes as long as all the rest here
                _core.mark_input(time.monotonic() - begin)
            except ValueError:  # the job is over
                pass

    return __next__
