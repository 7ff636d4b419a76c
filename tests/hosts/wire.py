"""A link between hosts of our own whose packets are delayed, lost or swallowed at will, in each direction by itself.

A TUN device in each host's network namespace, and a process per host that carries what leaves it to the others'
devices. It needs nothing of the kernel but TUN: neither netem nor nftables.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import multiprocessing
import os
import random
import select
import struct
import time
from pathlib import Path

import network

NAME = "wan0"
CLONE_NEWNET = 0x40000000
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x1, 0x1000, 0x4000
# Checksums and segmentation are left to whoever gets the packets in the end: nobody here.
CHECKSUM_AND_TSO = 0x1 | 0x2 | 0x4
VNET_HDR, DESTINATION = 10, 16
PACKET_MAX = 1 << 17


class Wire:
    """Joins hosts until it is closed; `addresses` are theirs on it.

    With `whole` packets are up to 64 KiB large, so that one processor carries some gigabits per second; else they are
    as large as on Ethernet, so that as many are lost as would be there.
    """

    def __init__(
        self,
        hosts: list[network.Host],
        *,
        addresses: list[str] | None = None,
        delay_s: float = 0,
        whole: bool = True,
        seed: int = 0,
    ) -> None:
        self.addresses = addresses or [f"198.19.0.{i + 1}" for i in range(len(hosts))]
        devices = [_device(host, whole) for host in hosts]
        for host, address in zip(hosts, self.addresses, strict=True):
            network.run("ip", "-n", host.namespace, "addr", "add", f"{address}/24", "dev", NAME)
            network.run(
                "ip", "-n", host.namespace, "link", "set", NAME, "txqueuelen", "100000", "up"
            )
        context = multiprocessing.get_context("fork")
        # For each way: the share of packets that are lost, and the delay of the others.
        self._routes = {
            (i, j): context.RawArray("d", [0.0, delay_s])
            for i in range(len(hosts))
            for j in range(len(hosts))
            if i != j
        }
        self._hosts = len(hosts)
        sinks = {bytes(map(int, a.split("."))): i for i, a in enumerate(self.addresses)}
        self._processes = []
        for i in range(len(hosts)):
            routes = {j: self._routes[i, j] for j in range(len(hosts)) if j != i}
            body = (devices, i, sinks, routes, VNET_HDR if whole else 0, seed + i)
            self._processes.append(context.Process(target=_carry, args=body, daemon=True))
        for process in self._processes:
            process.start()
        # The devices live as long as the processes hold them.
        for device in devices:
            os.close(device)

    def set(self, source: int, sink: int, *, loss: float = 0.0, delay_s: float = 0.0) -> None:
        """From here on this is what happens to packets from one host to another; a loss of 1 is a cut."""
        self._routes[source, sink][:] = [loss, delay_s]

    def last_host(
        self,
        *,
        cut_in: bool = False,
        cut_out: bool = False,
        loss: float = 0.0,
        delay_s: float = 0.0,
    ) -> None:
        """The same for all that the last host sends and gets."""
        last = self._hosts - 1
        for other in range(last):
            self.set(other, last, loss=1.0 if cut_in else loss, delay_s=delay_s)
            self.set(last, other, loss=1.0 if cut_out else loss, delay_s=delay_s)

    def close(self) -> None:
        """Ends it; the devices are gone with it."""
        for process in self._processes:
            process.kill()
            process.join()


def _device(host: network.Host, whole: bool) -> int:
    """A new TUN device inside the host's namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(Path("/run/netns") / host.namespace, os.O_RDONLY)
    try:
        _check(libc.setns(there, CLONE_NEWNET))
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        flags = IFF_TUN | IFF_NO_PI | (IFF_VNET_HDR if whole else 0)
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", NAME.encode(), flags))
        if whole:
            fcntl.ioctl(device, TUNSETOFFLOAD, CHECKSUM_AND_TSO)
    finally:
        _check(libc.setns(home, CLONE_NEWNET))
        os.close(home)
        os.close(there)
    return device


def _check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), "setns")


def _carry(
    devices: list[int],
    me: int,
    sinks: dict[bytes, int],
    routes: dict[int, ctypes.Array[ctypes.c_double]],
    header: int,
    seed: int,
) -> None:
    """Moves packets from one device to the others, each when its time has come."""
    source, dice = devices[me], random.Random(seed)
    waiting: list[tuple[float, int, int, bytes]] = []
    count = 0
    poll = select.poll()
    poll.register(source, select.POLLIN)
    begin, end = header + DESTINATION, header + DESTINATION + 4
    while True:
        left = max(waiting[0][0] - time.monotonic(), 0) if waiting else None
        poll.poll(None if left is None else left * 1000)
        try:
            while True:
                packet = os.read(source, PACKET_MAX)
                sink = sinks.get(packet[begin:end], me)
                if sink != me:
                    loss, delay_s = routes[sink]
                    if loss == 0 or dice.random() >= loss:
                        count += 1
                        heapq.heappush(waiting, (time.monotonic() + delay_s, count, sink, packet))
                if waiting and waiting[0][0] <= time.monotonic():
                    break
        except BlockingIOError:
            pass
        while waiting and waiting[0][0] <= time.monotonic():
            try:
                os.write(devices[waiting[0][2]], waiting[0][3])
            except BlockingIOError:
                break
            except OSError:
                pass  # the other end is going away, or the packet was not whole: as on any link
            heapq.heappop(waiting)
