"""A second link between two hosts of our own, on which every packet takes a while.

A TUN device in each host's network namespace, and a process per direction that holds each packet back
before it writes it to the other device. For kernels without netem; segments stay as large as on other
virtual links, so that one processor carries some gigabits per second.
"""

from __future__ import annotations

import ctypes
import fcntl
import multiprocessing
import os
import select
import struct
import time
from collections import deque
from pathlib import Path

import network

NAME = "wan0"
CLONE_NEWNET = 0x40000000
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x1, 0x1000, 0x4000
# Checksums and segmentation are left to whoever gets the packets in the end: nobody here.
CHECKSUM_AND_TSO = 0x1 | 0x2 | 0x4
PACKET_MAX = 1 << 17


class DelayedLink:
    """Joins both hosts until it is closed; `addresses` are theirs on it."""

    def __init__(self, hosts: list[network.Host], delay_s: float) -> None:
        devices = [_device(host) for host in hosts]
        self.addresses = [f"198.19.0.{i + 1}" for i in range(len(hosts))]
        for host, address in zip(hosts, self.addresses, strict=True):
            network.run("ip", "-n", host.namespace, "addr", "add", f"{address}/24", "dev", NAME)
            network.run(
                "ip", "-n", host.namespace, "link", "set", NAME, "txqueuelen", "100000", "up"
            )
        context = multiprocessing.get_context("fork")
        ways = ((devices[0], devices[1]), (devices[1], devices[0]))
        self._processes = [
            context.Process(target=_carry, args=(*way, delay_s), daemon=True) for way in ways
        ]
        for process in self._processes:
            process.start()
        # The devices live as long as the processes hold them.
        for device in devices:
            os.close(device)

    def close(self) -> None:
        """Ends both directions; the devices are gone with them."""
        for process in self._processes:
            process.kill()
            process.join()


def _device(host: network.Host) -> int:
    """A new TUN device inside the host's namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(Path("/run/netns") / host.namespace, os.O_RDONLY)
    try:
        _check(libc.setns(there, CLONE_NEWNET))
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", NAME.encode(), flags))
        fcntl.ioctl(device, TUNSETOFFLOAD, CHECKSUM_AND_TSO)
    finally:
        _check(libc.setns(home, CLONE_NEWNET))
        os.close(home)
        os.close(there)
    return device


def _check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), "setns")


def _carry(source: int, sink: int, delay_s: float) -> None:
    """Moves packets from one device to the other, each `delay_s` after it came."""
    waiting: deque[tuple[float, bytes]] = deque()
    poll = select.poll()
    poll.register(source, select.POLLIN)
    while True:
        left = max(waiting[0][0] - time.monotonic(), 0) if waiting else None
        poll.poll(None if left is None else left * 1000)
        try:
            while True:
                packet = os.read(source, PACKET_MAX)
                waiting.append((time.monotonic() + delay_s, packet))
                if waiting[0][0] <= time.monotonic():
                    break
        except BlockingIOError:
            pass
        while waiting and waiting[0][0] <= time.monotonic():
            try:
                os.write(sink, waiting[0][1])
            except BlockingIOError:
                break
            except OSError:
                pass  # the other end is going away, or the packet was not whole: as on any link
            waiting.popleft()
