"""The rendezvous of drivers that were written for Horovod 0.28, such as that of TonY.

Such a driver places the ranks with `horovod.runner.common.util.hosts`, and starts them with the variables of that
version. Driver and ranks need one setting more: the same `HOROVOD_JOB_KEY` (or `HOROVOD_JOB_KEY_FILE`).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from horovod import _absent, _core
from horovod.runner.common.util.hosts import SlotInfo

__all__ = ["RendezvousServer"]


class RendezvousServer:
    """Serves the rendezvous of one job on a port that the system chooses.

    `start`, `init` and `stop` behave as in Horovod 0.28. Ranks do not use HTTP, so request handlers cannot be replaced.
    """

    def __init__(self, verbose: int = 0) -> None:
        del verbose  # The ranks' own errors have all there is to say.
        self._key = _key()
        self._port: socket.socket | None = None
        self._served: _core.Rendezvous | None = None

    def start(self) -> int:
        """Choose the port and return it. Ranks that connect before `init` try again."""
        if self._port is None:
            self._port = _reserved()
        return _number(self._port)

    def init(self, host_alloc_plan: Sequence[SlotInfo]) -> None:
        """Serve the ranks of this plan, in place of those of an earlier one.

        Raises
        ------
        ValueError
            The plan has no rank.
        OSError
            The port cannot be listened on.
        """
        if not host_alloc_plan:
            raise ValueError("the plan of hosts has no rank; expected at least one SlotInfo")
        port = self.start()
        if self._served:
            self._served.close()
        self._served = _core.Rendezvous.at(port, len(host_alloc_plan), self._key)

    def stop(self) -> None:
        """Stop serving. Ranks that have met go on."""
        if self._served:
            self._served.close()
            self._served = None
        if self._port:
            self._port.close()
            self._port = None


def __getattr__(name: str) -> NoReturn:
    _absent.raise_missing(__name__, name)


def _reserved() -> socket.socket:
    """A bound socket that does not listen: the port stays free for the server, which asks for this very port."""
    family, every = (socket.AF_INET6, "::") if socket.has_dualstack_ipv6() else (socket.AF_INET, "")
    taken = socket.socket(family)
    if family == socket.AF_INET6:
        taken.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    taken.bind((every, 0))
    return taken


def _number(taken: socket.socket) -> int:
    port: int = taken.getsockname()[1]
    return port


def _key() -> str:
    if key := os.environ.get("HOROVOD_JOB_KEY"):
        return key.strip()
    if path := os.environ.get("HOROVOD_JOB_KEY_FILE"):
        return Path(path).read_text().strip()
    raise ValueError(
        "neither HOROVOD_JOB_KEY nor HOROVOD_JOB_KEY_FILE is set: set one of them for this driver and for all ranks "
        "(64 hex digits, from `openssl rand -hex 32`)"
    )
