"""Ranks that you start yourself: their places, environments and rendezvous.

For executors, which have means of their own to start processes (tasks, actors, pods, `subprocess`): tell `assign` on
which host each process is, give each the environment that it returns, and `hvd.init()` works as under `horovodrun`.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Self

from horovod import _core

__all__ = ["Rank", "RankZero", "Rendezvous", "RendezvousAddress", "assign", "without_job"]


@dataclasses.dataclass(frozen=True)
class RendezvousAddress:
    """Where ranks find each other: the addresses and the key of a `Rendezvous`.

    Any process with the key can join the job: send the key only to the hosts of your ranks.
    """

    addresses: tuple[str, ...]
    key: str = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class RankZero:
    """Rank 0 serves the rendezvous during its init, on this port of the address of its process.

    Nothing has to run elsewhere, but the port must be free there, and ranks are not told why one of them has died.
    """

    port: int
    key: str = dataclasses.field(default_factory=lambda: secrets.token_hex(32), repr=False)


class Rendezvous:
    """Serves the rendezvous of one job from this process, until it is closed.

    This process may be the executor's, or the one that is to be rank 0: then no port has to be known beforehand.

    Parameters
    ----------
    size
        Number of ranks.
    local
        All of them are on this host: without `interfaces` it listens on the loopback only.
    interfaces
        Names of the interfaces to use between hosts; none means all.
    """

    def __init__(self, size: int, *, local: bool = False, interfaces: Sequence[str] = ()) -> None:
        self._served = _core.Rendezvous(size, local and not interfaces, list(interfaces))
        self.address = RendezvousAddress(tuple(self._served.addresses()), self._served.key())

    def has_met(self) -> bool:
        """Whether all ranks have met."""
        return self._served.has_met()

    def report_death(self, rank: int, host: str, cause: str) -> None:
        """Tell the other ranks why one is lost, such as `"killed by signal 9"`: their errors name it."""
        self._served.report_death(rank, host, cause)

    def close(self) -> None:
        """Stop. Ranks that have met go on; they cannot meet again."""
        self._served.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


@dataclasses.dataclass(frozen=True)
class Rank:
    """A process's part in the job."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    host: str
    variables: Mapping[str, str] = dataclasses.field(repr=False)
    """Variables with these values for the process, and with the job's key."""

    def environment(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """`base` (default: this process's) without what it has of another job, and with this rank's variables."""
        return {**without_job(os.environ if base is None else base), **self.variables}


def assign(
    processes: Sequence[tuple[str, str]],
    rendezvous: RendezvousAddress | RankZero,
    *,
    interfaces: Sequence[str] = (),
) -> list[Rank]:
    """Make ranks of processes and return the part of each, in their order.

    The ranks of a host are consecutive, and hosts follow each other as their first processes do. So the first process
    is rank 0, and the order of the others may be any.

    Parameters
    ----------
    processes
        For each its host and an address. Processes with the same host are on one; its name need not resolve. The
        address is a name or an IP address by which the other hosts reach that host.
    rendezvous
        Where the ranks find each other.
    interfaces
        Names of the interfaces to use between hosts; none means all.

    Raises
    ------
    ValueError
        No processes, a host or address without a name, or a rendezvous that cannot be.
    """
    addresses, port = (
        ([], rendezvous.port) if isinstance(rendezvous, RankZero) else (rendezvous.addresses, 0)
    )
    if not addresses and isinstance(rendezvous, RendezvousAddress):
        raise ValueError("the rendezvous has no address")
    assigned = _core.assign_ranks(
        list(processes), list(addresses), port, rendezvous.key, list(interfaces)
    )
    return [
        Rank(*numbers, host=host, variables=variables)
        for (numbers, variables), (host, _) in zip(assigned, processes, strict=True)
    ]


def without_job(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment without what launchers tell a process of its part in a job.

    For processes that were part of another job, or whose parents are: what is left over would be believed.
    """
    names = frozenset(_core.names_of_a_job())
    return {name: value for name, value in environment.items() if name not in names}
