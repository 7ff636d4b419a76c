"""Messages between `horovod.run` and its ranks, and the address at which the ranks reach it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

_ADDRESSES = "HOROVOD_RUN_ADDRESSES"
_KEY = "HOROVOD_RUN_KEY"


@dataclasses.dataclass
class Place:
    """Addresses of the process that called `horovod.run`, and the key for mutual authentication."""

    addresses: list[str]
    key: str

    def to_environment(self) -> Mapping[str, str]:
        """Return the place as environment variables; the launcher sends them over its agents' standard input."""
        return {_ADDRESSES: ",".join(self.addresses), _KEY: self.key}

    @staticmethod
    def from_environment() -> Place:
        """Return the place from the variables that the launcher has set."""
        try:
            return Place(os.environ[_ADDRESSES].split(","), os.environ[_KEY])
        except KeyError as missing:
            raise RuntimeError(
                f"{missing} is not set: this module is started by horovod.run() only"
            ) from None

    @staticmethod
    def remove_from_environment() -> None:
        """Remove the variables of the place."""
        for name in (_ADDRESSES, _KEY):
            os.environ.pop(name, None)


@dataclasses.dataclass
class FunctionCall:
    """Payload for every rank: the pickled function with its arguments, and the caller's module search path."""

    function: bytes
    sys_path: list[str]


@dataclasses.dataclass
class Outcome:
    """Result of the function on one rank."""

    host: str
    # "result", "error", "exit" or "unpicklable"
    kind: str
    # the pickled result or exception; may be empty
    content: bytes
    text: str
    exit_status: int


@dataclasses.dataclass(frozen=True)
class Report:
    """Progress of a rank."""

    rank: int
    size: int
    step: int | None
    steps: int | None
    epoch: int | None
    epochs: int | None
    values: dict[str, float]


class PackedException:
    """Pickles an exception by its class, arguments and attributes, so that unpickling does not call `__init__`."""

    def __init__(self, error: Exception) -> None:
        self._parts = (type(error), error.args, dict(vars(error)))

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpack, self._parts


def _unpack(kind: type[Exception], args: tuple[Any, ...], attributes: dict[str, Any]) -> Exception:
    error = kind.__new__(kind, *args)
    error.args = args
    vars(error).update(attributes)
    return error
