"""Places, environments and a rendezvous for ranks that another program starts.

This serves executors that start processes themselves (tasks, actors, pods, `subprocess`). Pass the host of each process
to `assign`, and start each process with the environment that `assign` returns. `hvd.init()` then works as under
`horovodrun`.
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
    """The addresses and the key of a `Rendezvous`, through which ranks connect to each other.

    Any process with the key can join the job. Send the key only to the hosts of your ranks.
    """

    addresses: tuple[str, ...]
    key: str = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class RankZero:
    """Makes rank 0 serve the rendezvous during `init`, on this port of the address of its process.

    No other process has to run, but the port must be free on that host. Errors about a dead rank do not contain the
    cause, because no process calls `Rendezvous.report_death`.
    """

    port: int
    key: str = dataclasses.field(default_factory=lambda: secrets.token_hex(32), repr=False)


class Rendezvous:
    """Serves the rendezvous of one job from this process, until `close` is called.

    This process may be the executor, or the process that becomes rank 0. In contrast to `RankZero`, the system chooses
    the port.

    Parameters
    ----------
    size
        Number of ranks.
    local
        Whether all ranks are on this host. The rendezvous then listens on the loopback interface only, unless
        `interfaces` are given.
    interfaces
        Names of the interfaces to use between hosts; none means all.
    """

    def __init__(self, size: int, *, local: bool = False, interfaces: Sequence[str] = ()) -> None:
        self._served = _core.Rendezvous(size, local and not interfaces, list(interfaces))
        self.address = RendezvousAddress(tuple(self._served.addresses()), self._served.key())

    def has_met(self) -> bool:
        """Return whether all ranks have connected to each other."""
        return self._served.has_met()

    def report_death(self, rank: int, host: str, cause: str) -> None:
        """Send the other ranks the cause of a rank's death, such as `"killed by signal 9"`, for their error texts."""
        self._served.report_death(rank, host, cause)

    def close(self) -> None:
        """Stop serving. Connected ranks continue; no further `init` can use this rendezvous."""
        self._served.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


@dataclasses.dataclass(frozen=True)
class Rank:
    """The numbers and variables of one process in the job."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    host: str
    variables: Mapping[str, str] = dataclasses.field(repr=False)
    """Environment variables for the process: its numbers, and the job's key."""

    def environment(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return `base` without the variables of any other job, and with the variables of this rank.

        Default of `base`: the environment of this process.
        """
        return {**without_job(os.environ if base is None else base), **self.variables}


def assign(
    processes: Sequence[tuple[str, str]],
    rendezvous: RendezvousAddress | RankZero,
    *,
    interfaces: Sequence[str] = (),
) -> list[Rank]:
    """Assign ranks to processes and return one `Rank` for each process, in the order of `processes`.

    The ranks of a host are consecutive. Hosts are ordered by their first processes. The first process is therefore
    rank 0; the other processes may be in any order.

    Parameters
    ----------
    processes
        The host and an address of each process. Processes with the same host name run on the same host; the name need
        not resolve. The address is a name or an IP address by which the other hosts reach that host.
    rendezvous
        Rendezvous through which the ranks connect to each other.
    interfaces
        Names of the interfaces to use between hosts; none means all.

    Raises
    ------
    ValueError
        `processes` is empty, a host or address is empty, or the rendezvous is invalid.
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
    """Return the environment without the variables by which launchers describe a process's part in a job.

    Use this for processes that were part of another job, or whose parents are: Horovod would use the old variables.
    """
    names = frozenset(_core.names_of_a_job())
    return {name: value for name, value in environment.items() if name not in names}
