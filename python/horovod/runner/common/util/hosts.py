"""Hosts and slots: reading lists of hosts, and which rank runs where.

`horovodrun` has this built in; these functions are for launchers of others that place ranks by themselves.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable

from horovod import _core

__all__ = [
    "INVALID_SLOT_INFO",
    "HostInfo",
    "SlotInfo",
    "get_host_assignments",
    "parse_host_files",
    "parse_hosts",
    "parse_hosts_and_slots",
]


@dataclasses.dataclass
class HostInfo:
    """A host, and how many ranks may run there."""

    hostname: str
    slots: int

    @staticmethod
    def from_string(host_string: str) -> HostInfo:
        """Read `name:slots`."""
        found = parse_hosts(host_string)
        if len(found) != 1:
            raise ValueError(f"Invalid host input {host_string!r}: expected one host, worker-0:2")
        return found[0]


@dataclasses.dataclass
class SlotInfo:
    """One rank's place in the job."""

    hostname: str
    rank: int
    local_rank: int
    cross_rank: int
    size: int
    local_size: int
    cross_size: int

    def to_response_string(self) -> str:
        """Rank, size, local rank, local size, cross rank and cross size, separated by commas."""
        numbers = (
            self.rank,
            self.size,
            self.local_rank,
            self.local_size,
            self.cross_rank,
            self.cross_size,
        )
        return ",".join(map(str, numbers))


INVALID_SLOT_INFO = SlotInfo(
    hostname="", rank=-1, local_rank=-1, cross_rank=-1, size=-1, local_size=-1, cross_size=-1
)


def parse_hosts(hosts_string: str) -> list[HostInfo]:
    """Read `host1:2,host2:4`, with or without a comma at the end. ValueError names an item that is not of this form."""
    return [HostInfo(*host) for host in _core.parse_hosts(hosts_string)]


def parse_hosts_and_slots(hosts: str) -> tuple[list[str], dict[str, int]]:
    """Read `host1:2,host2:4` into the names in order, and the slots of each."""
    slots: dict[str, int] = {}
    for host in parse_hosts(hosts):
        slots[host.hostname] = slots.get(host.hostname, 0) + host.slots
    return list(slots), slots


def parse_host_files(filename: str | os.PathLike[str]) -> str:
    """Read a hostfile (`name slots=n`, `name:n` or `name`, comments from #) into `host1:2,host2:4`."""
    return ",".join(f"{name}:{slots}" for name, slots in _core.read_hostfile(filename))


def get_host_assignments(
    hosts: Iterable[HostInfo], min_num_proc: int, max_num_proc: int | None = None
) -> list[SlotInfo]:
    """Fill the hosts in order, all slots of one before the next, until `max_num_proc` ranks (default: all slots).

    A host that is listed twice has the sum of its slots. ValueError if there are fewer slots than `min_num_proc`.
    """
    placed = _core.place_ranks(
        [(host.hostname, host.slots) for host in hosts], min_num_proc, max_num_proc
    )
    return [
        SlotInfo(
            hostname=name,
            rank=rank,
            local_rank=local_rank,
            cross_rank=cross_rank,
            size=size,
            local_size=local_size,
            cross_size=cross_size,
        )
        for name, (rank, size, local_rank, local_size, cross_rank, cross_size) in placed
    ]
