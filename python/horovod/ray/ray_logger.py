"""Values that ranks report to callbacks of the driver."""

from __future__ import annotations

import logging
import os
from multiprocessing.connection import Client
from typing import Any, Protocol

__all__ = ["configure", "log"]

# How ranks that are children of an actor reach it.
SOCKET = "HOROVOD_RAY_LOG_SOCKET"
KEY = "HOROVOD_RAY_LOG_KEY"


class _Sink(Protocol):
    def put(self, item: Any) -> Any: ...


class _ToActor:
    """Sends over the socket of the actor that is the parent."""

    def __init__(self, path: str, key: str) -> None:
        self._connection = Client(path, "AF_UNIX", authkey=bytes.fromhex(key))

    def put(self, item: Any) -> None:
        self._connection.send(item)
        # So that nothing is lost if this process ends now.
        self._connection.recv()


_sink: _Sink | None = None
_has_warned = False


def configure(queue: _Sink | None) -> None:
    """Put what is logged in this process into this queue."""
    global _sink
    _sink = queue


def log(info_dict: dict[str, Any]) -> None:
    """Report values to the callbacks of `run`; without any it warns once."""
    global _has_warned, _sink
    if _sink is None and SOCKET in os.environ:
        _sink = _ToActor(os.environ[SOCKET], os.environ[KEY])
    if _sink is not None:
        _sink.put(info_dict)
    elif not _has_warned:
        _has_warned = True
        logging.getLogger(__name__).warning(
            "ray_logger.log: nobody listens; pass callbacks to the run() of an elastic executor"
        )
