"""One bit that changes between two ranks: run inside one of them, it puts a relay into the rank's connections.

Every TCP connection that the engine waits for gets another socket under its descriptor, and threads carry the bytes
between that one and the real one. So it needs neither root, nor a network of its own, nor a door in the engine.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

ADD, REMOVE = 1, 2
# Changes the bytes of one connection as they pass.
Change = Callable[[bytes], bytes]

_left = threading.Event()


class Event(ctypes.Structure):
    """An event of epoll for a descriptor; on x86-64 the kernel has it without a gap."""

    _pack_ = 1 if os.uname().machine == "x86_64" else 8
    _fields_ = (("events", ctypes.c_uint32), ("data", ctypes.c_uint64))


def flip(byte: int, *, outgoing: bool) -> int:
    """Make the lowest bit of the byte with this number change, once, in the first connection that carries so many.

    Nothing may be under way. Returns how many connections there are.
    """
    damage = _once_at(byte)
    connections = [found for found in _waited_for() if _is_tcp(found[1])]
    for epoll, descriptor, event in connections:
        real = socket.socket(fileno=os.dup(descriptor))
        near, far = _pair()
        # The engine hears of its descriptor's new socket in the way in which it heard of the old one.
        _control(epoll, REMOVE, descriptor, event)
        near.setblocking(False)
        os.dup2(near.fileno(), descriptor, inheritable=False)
        near.close()
        _control(epoll, ADD, descriptor, event)
        for source, sink, is_outgoing in ((far, real, True), (real, far, False)):
            change = damage() if is_outgoing == outgoing else bytes
            args = (source, sink, change, not is_outgoing)
            threading.Thread(target=_carry, args=args, daemon=True).start()
    return len(connections)


def wait_until_left() -> None:
    """Wait until a peer has closed its connection. This rank's earlier messages have arrived by then."""
    _left.wait()


def _once_at(byte: int) -> Callable[[], Change]:
    """The change for a new connection; of all of them one bit changes."""
    is_done = threading.Event()

    def connection() -> Change:
        seen = 0

        def change(data: bytes) -> bytes:
            nonlocal seen
            at = byte - seen
            seen += len(data)
            if not 0 <= at < len(data) or is_done.is_set():
                return data
            is_done.set()
            return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

        return change

    return connection


def _carry(source: socket.socket, sink: socket.socket, change: Change, is_from_afar: bool) -> None:
    try:
        # The engine's settings hold for the real socket: it does not block.
        while select.select([source], [], []) and (data := source.recv(1 << 16)):
            rest = memoryview(change(data))
            while rest:
                select.select([], [sink], [])
                rest = rest[sink.send(rest) :]
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        # An end is gone: then so is the other.
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
    if is_from_afar:
        _left.set()


def _pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a TCP connection: the engine sets options that other sockets lack."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, origin = server.accept()
        # A client that still looks for the port's last owner may connect first.
        while origin != one.getsockname():
            other.close()
            other, origin = server.accept()
    for end in (one, other):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return one, other


def _waited_for() -> Iterator[tuple[int, int, Event]]:
    """Everything that any epoll of this process waits for: the epoll, the descriptor, and as what."""
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if os.readlink(entry) != "anon_inode:[eventpoll]":
                continue
            text = Path("/proc/self/fdinfo", entry.name).read_text()
        except OSError:
            continue
        for fd, events, data in re.findall(r"tfd:\s*(\d+) events:\s*(\w+) data:\s*(\w+)", text):
            yield int(entry.name), int(fd), Event(int(events, 16), int(data, 16))


def _is_tcp(descriptor: int) -> bool:
    try:
        with socket.socket(fileno=os.dup(descriptor)) as found:
            is_internet = found.family in (socket.AF_INET, socket.AF_INET6)
            return is_internet and found.type & socket.SOCK_STREAM != 0
    except OSError:
        return False


def _control(epoll: int, what: int, descriptor: int, event: Event) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.epoll_ctl(epoll, what, descriptor, ctypes.byref(event)):
        raise OSError(ctypes.get_errno(), "epoll_ctl")
