"""Exchange between `horovod.run` and its ranks, and its address."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

_ADDRESSES = "HOROVOD_RUN_ADDRESSES"
_KEY = "HOROVOD_RUN_KEY"


@dataclasses.dataclass
class Place:
    """Where the caller of `horovod.run` can be reached, and the key that proves who is who."""

    addresses: list[str]
    key: str

    def to_environment(self) -> Mapping[str, str]:
        """As variables; the launcher passes them on over its agents' standard input."""
        return {_ADDRESSES: ",".join(self.addresses), _KEY: self.key}

    @staticmethod
    def from_environment() -> Place:
        """As the launcher has set them."""
        try:
            return Place(os.environ[_ADDRESSES].split(","), os.environ[_KEY])
        except KeyError as missing:
            raise RuntimeError(
                f"{missing} is not set: this module is started by horovod.run() only"
            ) from None

    @staticmethod
    def remove_from_environment() -> None:
        """Forget them."""
        for name in (_ADDRESSES, _KEY):
            os.environ.pop(name, None)


@dataclasses.dataclass
class FunctionCall:
    """Payload for every rank: the pickled function with its arguments, and where modules are searched."""

    function: bytes
    sys_path: list[str]


@dataclasses.dataclass
class Outcome:
    """Result of the function on one rank."""

    host: str
    # "result", "error", "exit" or "unpicklable"
    kind: str
    # the pickled result or exception
    content: bytes
    text: str
    exit_status: int


@dataclasses.dataclass(frozen=True)
class Report:
    """How far a rank is."""

    rank: int
    size: int
    step: int | None
    steps: int | None
    epoch: int | None
    epochs: int | None
    values: dict[str, float]


class PackedException:
    """An exception that is pickled by its parts, so that its class is not called again when it is unpickled."""

    def __init__(self, error: Exception) -> None:
        self._parts = (type(error), error.args, dict(vars(error)))

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpack, self._parts


def _unpack(kind: type[Exception], args: tuple[Any, ...], attributes: dict[str, Any]) -> Exception:
    error = kind.__new__(kind, *args)
    error.args = args
    vars(error).update(attributes)
    return error
