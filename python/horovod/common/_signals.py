"""Signals that arrive while the main thread waits in a framework's native code: how their handlers get to run.

Python runs handlers in the main thread alone, between two of its own steps. A wait of this package looks for signals.
A wait in TensorFlow, XLA or MXNet does not: the thread comes back when the operation ends. An operation that ends with
a callback may stall, and the handler of a signal that asks for the end may not run. After a while this process then
leaves the job. Its operations then end with an error, the framework returns, and the handler runs.
"""

import ctypes
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from horovod import _core

_log = logging.getLogger("horovod")

# How long operations may go on after SIGINT, or a second SIGTERM, which ask for the end at once. A handler of another
# signal may only note that the process is to end later. Then the operation should rather end by itself.
_AT_ONCE_S = 1.0
_WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)

_PendingCall = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)

_is_wanted = False
_watch: "_Watch | None" = None


def want_handlers_to_run() -> None:
    """Have `init` watch for signals: for adapters of frameworks whose threads compute and wait in native code."""
    global _is_wanted
    _is_wanted = True
    _core.expect_guests()


def job_begins() -> None:
    """Begin to watch, if an adapter wants it and nobody else in this process is told of signals."""
    global _watch
    if not _is_wanted:
        return
    _core.expect_guests()
    if _watch is None and threading.current_thread() is threading.main_thread():
        _watch = _Watch.begin(_core.signal_grace())


class _Arrived:
    """A signal whose handler may not have run yet."""

    def __init__(self, number: int, now: float, grace_s: float) -> None:
        self.at = now
        self.deadline = now + (_AT_ONCE_S if number == signal.SIGINT else grace_s or math.inf)
        self._number = number
        self._pending = set(_core.called_back())
        self._is_back = threading.Event()

        def note(_: object) -> int:
            self._is_back.set()
            return 0

        # Python makes such calls where it runs handlers, after these. Without room for one nothing can be told.
        self._call = _PendingCall(note)
        if ctypes.pythonapi.Py_AddPendingCall(self._call, None):
            self._is_back.set()

    def comes_again(self, now: float) -> None:
        """Take a second SIGTERM for a demand. Two at a time may be one that came on two ways."""
        if self._number == signal.SIGTERM and now >= self.at + _AT_ONCE_S:
            self.deadline = min(self.deadline, now + _AT_ONCE_S)

    def is_over(self) -> bool:
        """Whether the main thread has come back to Python."""
        return self._is_back.is_set()

    def has_stalled(self) -> bool:
        """Whether the handler has not run, and an operation that was pending at the signal is still pending."""
        return (
            not self._is_back.is_set()
            and bool(self._pending & set(_core.called_back()))
            and not _runs(signal.getsignal(self._number))
            # A periodic timer drives something, and is no limit of time.
            and not (self._number == signal.SIGALRM and signal.getitimer(signal.ITIMER_REAL)[1])
        )


class _Watch:
    """The thread that Python tells of signals."""

    def __init__(self, reader: socket.socket, writer: socket.socket, grace_s: float) -> None:
        self._reader, self._writer = reader, writer
        self._grace_s = grace_s
        self._arrived: dict[int, _Arrived] = {}
        # Python may still make their calls.
        self._kept: list[_Arrived] = []
        threading.Thread(target=self._run, name="hvd-signals", daemon=True).start()

    @classmethod
    def begin(cls, grace_s: float) -> "_Watch | None":
        other = signal.set_wakeup_fd(-1)
        if other != -1 and _wake(other):
            return None
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        watch = cls(reader, writer, grace_s)
        os.register_at_fork(after_in_child=watch._leave_to_parent)
        return watch

    def _leave_to_parent(self) -> None:
        """In a child process: its signals are none of the parent's."""
        if threading.current_thread() is threading.main_thread():
            other = signal.set_wakeup_fd(-1)
            if other not in (-1, self._writer.fileno()):
                _wake(other)

    def _run(self) -> None:
        while True:
            deadlines = [arrived.deadline for arrived in self._arrived.values()]
            left = min(deadlines, default=math.inf) - time.monotonic()
            self._reader.settimeout(None if left == math.inf else max(left, 0.001))
            try:
                numbers = self._reader.recv(4096)
            except TimeoutError:
                numbers = b""
            now = time.monotonic()
            for number in set(_WATCHED).intersection(numbers):
                before = self._arrived.get(number)
                if before is None or before.is_over():
                    self._arrived[number] = _Arrived(number, now, self._grace_s)
                else:
                    before.comes_again(now)
            self._poll(now)

    def _poll(self, now: float) -> None:
        for number in [n for n, arrived in self._arrived.items() if arrived.deadline <= now]:
            arrived = self._arrived.pop(number)
            self._kept = [kept for kept in [*self._kept, arrived] if not kept.is_over()]
            if arrived.has_stalled():
                _leave(number, now - arrived.at)


def _wake(fd: int) -> bool:
    """Have Python tell this descriptor of signals. False: somebody has closed it, so nobody hears of them there."""
    try:
        signal.set_wakeup_fd(fd, warn_on_full_buffer=False)
    except (OSError, ValueError):
        return False
    return True


def _leave(number: int, waited_s: float) -> None:
    name = signal.Signals(number).name
    _log.warning(
        "Horovod: the handler of %s could not run for %.0f s, because the main thread waits in native code for "
        "operations that do not end. This rank leaves the job, so that they end and the handler runs.",
        name,
        waited_s,
    )
    _core.leave_interrupted()


def _runs(handler: "Callable[[int, FrameType | None], Any] | int | None") -> bool:
    """Whether the main thread is in this handler, perhaps in native code."""
    code = getattr(getattr(handler, "__func__", handler), "__code__", None)
    main = threading.main_thread().ident
    frame = sys._current_frames().get(main) if main is not None else None
    while isinstance(code, CodeType) and frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False
