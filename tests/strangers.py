"""Finds the sockets that a job listens on and sends garbage there; also a program, to be run on another host:
`python strangers.py HOST PORT BYTES` prints how many bytes the job took."""

from __future__ import annotations

import os
import random
import socket
import sys
from collections.abc import Iterable
from pathlib import Path

# A socket's address as connect() takes it, after its family.
Place = tuple[str, object]

LISTEN = "0A"
ACCEPTS = 0x10000
CONNECTIONS_MAX = 20_000
FAMILIES = {"tcp": socket.AF_INET, "tcp6": socket.AF_INET6, "unix": socket.AF_UNIX}


def listening(pids: Iterable[int]) -> list[Place]:
    """Addresses of all sockets that these processes listen on; wildcards become the loopback address."""
    loopback = {"0.0.0.0": "127.0.0.1", "::": "::1"}
    found: dict[Place, None] = {}
    for family, address in bound(pids):
        if isinstance(address, tuple):
            address = (loopback.get(address[0], address[0]), address[1])
        found[family, address] = None
    return list(found)


def bound(pids: Iterable[int]) -> list[Place]:
    """Addresses of all sockets that these processes listen on, as they are."""
    found: dict[Place, None] = {}
    for pid in pids:
        inodes = _socket_inodes(pid)
        net = Path(f"/proc/{pid}/net")
        for family, length in (("tcp", 4), ("tcp6", 16)):
            for line in (net / family).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTEN and fields[9] in inodes:
                    address, port = fields[1].split(":")
                    # Words of four bytes in the machine's order.
                    words = [bytes.fromhex(address)[at : at + 4] for at in range(0, length, 4)]
                    packed = b"".join(
                        word[:: 1 if sys.byteorder == "big" else -1] for word in words
                    )
                    host = socket.inet_ntop(FAMILIES[family], packed)
                    found[family, (host, int(port, 16))] = None
        for line in (net / "unix").read_text().splitlines()[1:]:
            fields = line.split()
            if len(fields) == 8 and fields[6] in inodes and int(fields[3], 16) & ACCEPTS:
                path = fields[7]
                found["unix", "\0" + path[1:] if path.startswith("@") else path] = None
    return list(found)


def connect(place: Place) -> socket.socket:
    """Connect to one of the addresses."""
    connection = socket.socket(FAMILIES[place[0]], socket.SOCK_STREAM)
    connection.settimeout(10)
    connection.connect(place[1])
    return connection


def send_garbage(place: Place, budget: int) -> int:
    """Send up to `budget` bytes, over new connections whenever the job hangs up; bounded in connections too."""
    noise = random.Random(7).randbytes(1 << 20)
    sent = 0
    for attempt in range(CONNECTIONS_MAX):
        if sent >= budget:
            break
        try:
            with connect(place) as connection:
                # Different first bytes each time: short, long and zero lengths.
                connection.sendall(bytes([attempt % 256]) * (attempt % 5))
                while sent < budget:
                    sent += connection.send(noise[: budget - sent])
        except OSError:
            continue
    return sent


def _socket_inodes(pid: int) -> set[str]:
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            link = os.readlink(entry)
        except OSError:
            continue
        if link.startswith("socket:["):
            inodes.add(link[8:-1])
    return inodes


if __name__ == "__main__":
    print(send_garbage(("tcp", (sys.argv[1], int(sys.argv[2]))), int(sys.argv[3])))
