"""Snapshots of state dicts: copied into memory that is allocated once; where allowed, in the background."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from horovod.common._trees import rebuilt


class Deferred(Protocol):
    """One array that is still to be copied."""

    @property
    def name(self) -> str:
        """Its path in the state dict."""

    def copy(self) -> None:
        """Copy it; called in another thread."""

    def was_changed(self) -> bool:
        """Whether it was changed since it was to be copied."""


# Whether an array, of this name, may be copied later.
MayWait = Callable[[str, Any], bool]


class Copies(Protocol):
    """How a framework copies what is in a state dict."""

    def copy(
        self, value: Any, reused: Any, name: str, may_wait: MayWait
    ) -> tuple[Any, Deferred | None]:
        """A copy of an array or object, in the memory of an earlier copy if that fits.

        Of an array that may wait it has any content, until what comes with it has run.
        """


def never(name: str, value: Any) -> bool:
    """Of nothing the copy may wait."""
    del name, value
    return False


class Snapshot:
    """One state dict as it was at some moment: a complete copy, and the memory in which the next one is made."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._complete: Any = None
        self._written: Any = None

    def take(self, tree: Any, may_wait: MayWait = never) -> list[Deferred]:
        """Copy a state dict, but for the arrays that may wait; those are returned. `complete` ends it."""
        deferred: list[Deferred] = []

        def leaf(value: Any, reused: Any, name: str) -> Any:
            result, later = self._copies.copy(value, reused, name, may_wait)
            if later is not None:
                deferred.append(later)
            return result

        self._written = rebuilt(tree, self._written, leaf)
        return deferred

    def complete(self) -> None:
        """Make the copy that was just written the one that counts; the other's memory is used for the next."""
        self._complete, self._written = self._written, self._complete

    @property
    def complete_copy(self) -> Any:
        """The state dict, in memory that a later snapshot writes to."""
        return self._complete

    def value(self) -> Any:
        """The state dict, as arrays and objects of its own: whoever loads it may keep them."""
        copy = self._copies.copy
        return rebuilt(
            self._complete, None, lambda value, _, name: copy(value, None, name, never)[0]
        )


class Copier:
    """Copies arrays in a thread of its own, one batch at a time."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._running: tuple[Future[None], Sequence[Deferred], Callable[[], None]] | None = None

    def start(self, deferred: Sequence[Deferred], done: Callable[[], None]) -> None:
        """Begin to copy; `done` is called by the `finish` that follows."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="horovod-commit")
        self._running = (self._thread.submit(_copy_all, deferred), deferred, done)

    def finish(self) -> None:
        """Wait for the copies that were begun.

        Raises
        ------
        RuntimeError
            An array was changed meanwhile.
        """
        if self._running is None:
            return
        (future, deferred, done), self._running = self._running, None
        future.result()
        for entry in deferred:
            if entry.was_changed():
                raise RuntimeError(
                    f"{entry.name} was changed while commit() was saving it in the background. With "
                    "commit_in_background, only optimizer.step() may change parameters and optimizer state between "
                    "a commit and the next step; change them before the commit, or turn commit_in_background off."
                )
        done()


def _copy_all(deferred: Sequence[Deferred]) -> None:
    for entry in deferred:
        entry.copy()
