"""News about hosts in the form of the original's scripts: kinds, a state's queue, a manager of listeners."""

from __future__ import annotations

import contextlib
import enum
import queue
import time
from typing import Any, Protocol

from horovod import _core

# How often a caller that waits in `HostMessages.get` polls: the launcher's news can be polled, not waited for.
_POLL_S = 0.05


class HostUpdateResult(enum.IntFlag):
    """Kind of a change of the hosts."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added


class HostMessages:
    """News that a state has not acted upon yet: the launcher's, and what was put into it.

    Only `State.check_host_updates` acts upon them; scripts of the original wait for the queue to be not `empty()`.
    """

    def __init__(self) -> None:
        self._given: queue.SimpleQueue[tuple[float, int]] = queue.SimpleQueue()
        # Version of the launcher's newest announcement that was acted upon or taken from here.
        self._known = 0

    def put(self, message: tuple[float, int]) -> None:
        """Add news: their time, and a `HostUpdateResult`."""
        self._given.put(message)

    def empty(self) -> bool:
        """Whether there are no news."""
        return self._given.empty() and self._announced() <= self._known

    def qsize(self) -> int:
        """How many there are."""
        return self._given.qsize() + int(self._announced() > self._known)

    def get(self, block: bool = True, timeout: float | None = None) -> tuple[float, int]:
        """Take the oldest, which then no longer counts here; `check_host_updates` still acts upon the launcher's.

        Raises
        ------
        queue.Empty
            There are none, or none came in time.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with contextlib.suppress(queue.Empty):
                return self._given.get_nowait()
            announced = self._announced()
            if announced > self._known:
                self._known = announced
                return time.time(), _core.host_updates()[1]
            if not block or (deadline is not None and time.monotonic() >= deadline):
                raise queue.Empty
            time.sleep(_POLL_S)

    def get_nowait(self) -> tuple[float, int]:
        """As `get`, without waiting."""
        return self.get(block=False)

    def take_given(self) -> list[int]:
        """Take all that was put here: of each what has become of the hosts."""
        kinds = []
        with contextlib.suppress(queue.Empty):
            while True:
                kinds.append(int(self._given.get_nowait()[1]))
        return kinds

    def acted_upon(self, announced: int) -> None:
        """Note that the launcher's announcements up to this version need not be reported any more."""
        self._known = announced

    def _announced(self) -> int:
        return _core.host_updates()[0] if _core.is_initialized() else 0


class Listener(Protocol):
    """Receiver of changes of hosts, such as a state."""

    def on_hosts_updated(self, timestamp: float, update_result: int) -> Any:
        """Receive it."""


class WorkerNotificationManager:
    """Passes on news about hosts that are given to it; the launcher's own news reach states without it.

    `hvd.elastic.run` registers its state while it runs.
    """

    def __init__(self) -> None:
        self._listeners: list[Listener] = []

    def init(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: each rank receives the news over the connection that it has."""
        del args, kwargs

    def register_listener(self, listener: Listener) -> None:
        """Pass news on to a listener from now on."""
        self._listeners.append(listener)

    def remove_listener(self, listener: Listener) -> None:
        """Pass no more news on to it."""
        self._listeners = [known for known in self._listeners if known is not listener]

    def handle_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Pass news on to all listeners."""
        for listener in list(self._listeners):
            listener.on_hosts_updated(timestamp, update_res)


notification_manager = WorkerNotificationManager()
