"""Hosts and slots: reading lists of hosts, and which rank runs where.

`horovodrun` has this built in; these functions are for launchers of others that place ranks by themselves.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path

__all__ = [
    "INVALID_SLOT_INFO",
    "HostInfo",
    "SlotInfo",
    "get_host_assignments",
    "parse_host_files",
    "parse_hosts",
    "parse_hosts_and_slots",
]

# `name`, `user@name` or `[::1]`, and a number of slots.
_HOST = re.compile(r"(?P<name>(?:[\w.-]+@)?(?:[\w.-]+|\[[0-9a-fA-F:.]+\])):(?P<slots>[0-9]+)")


@dataclasses.dataclass
class HostInfo:
    """A host, and how many ranks may run there."""

    hostname: str
    slots: int

    @staticmethod
    def from_string(host_string: str) -> HostInfo:
        """Read `name:slots`."""
        match = _HOST.fullmatch(host_string.strip())
        if match is None:
            raise ValueError(
                f"Invalid host input {host_string!r}, please make sure it has format as : "
                "worker-0:2,worker-1:2."
            )
        return HostInfo(match["name"], int(match["slots"]))


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
    items = hosts_string.rstrip().removesuffix(",").split(",")
    return [HostInfo.from_string(item) for item in items]


def parse_hosts_and_slots(hosts: str) -> tuple[list[str], dict[str, int]]:
    """Read `host1:2,host2:4` into the names in order, and the slots of each."""
    slots: dict[str, int] = {}
    for host in parse_hosts(hosts):
        slots[host.hostname] = slots.get(host.hostname, 0) + host.slots
    return list(slots), slots


# Longest hostfile that is read, as in `horovodrun`: a device has no end.
_FILE_CHARACTERS_MAX = 4 << 20


def parse_host_files(filename: str) -> str:
    """Read a hostfile (`name slots=n`, `name:n` or `name`, comments from #) into `host1:2,host2:4`."""
    items = []
    with Path(filename).open() as file:
        text = file.read(_FILE_CHARACTERS_MAX + 1)
    if len(text) > _FILE_CHARACTERS_MAX:
        raise ValueError(f"{filename}: it is longer than {_FILE_CHARACTERS_MAX} characters")
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#")[0].replace("=", " = ").split()
        if not words:
            continue
        name, rest = words[0], words[1:]
        slots = "1"
        if not rest and ":" in name and _HOST.fullmatch(name):
            items.append(name)
            continue
        for at in range(0, len(rest), 3):
            setting = rest[at : at + 3]
            if len(setting) != 3 or setting[1] != "=" or not setting[2].isdigit():
                raise ValueError(f"{filename}, line {number}: {line!r} is not understood")
            if setting[0] == "slots":
                slots = setting[2]
        items.append(f"{name}:{slots}")
        HostInfo.from_string(items[-1])
    return ",".join(items)


def get_host_assignments(
    hosts: Iterable[HostInfo], min_num_proc: int, max_num_proc: int | None = None
) -> list[SlotInfo]:
    """Fill the hosts in order, all slots of one before the next, until `max_num_proc` ranks (default: all slots).

    A host that is listed twice has the sum of its slots. ValueError if there are fewer slots than `min_num_proc`.
    """
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.hostname] = slots.get(host.hostname, 0) + host.slots
    available = sum(slots.values())
    if available < min_num_proc:
        raise ValueError(
            f"Requested more processes ({min_num_proc}) than there are available slots ({available})"
        )
    size = available if max_num_proc is None else min(available, max_num_proc)
    used: list[tuple[str, int]] = []
    left = size
    for name, count in slots.items():
        here = min(count, left)
        left -= here
        if here:
            used.append((name, here))
    found: list[SlotInfo] = []
    for place, (name, here) in enumerate(used):
        for local_rank in range(here):
            found.append(
                SlotInfo(
                    hostname=name,
                    rank=len(found),
                    local_rank=local_rank,
                    cross_rank=sum(count > local_rank for _, count in used[:place]),
                    size=size,
                    local_size=here,
                    cross_size=sum(count > local_rank for _, count in used),
                )
            )
    return found
