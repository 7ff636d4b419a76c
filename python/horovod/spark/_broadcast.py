"""Broadcast variables of Spark in what is sent to ranks.

Spark gives them to the Python workers of its tasks. Ranks are children of those, so each gets the value instead.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle  # type: ignore[import-untyped]


class BroadcastValue:
    """A broadcast variable as a rank sees it."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Call:
    """A function with its arguments, pickled with the values of the broadcast variables that it uses."""

    def __init__(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> None:
        self._call = func, tuple(args), dict(kwargs or {})

    def __call__(self) -> Any:
        func, args, kwargs = self._call
        return func(*args, **kwargs)

    def __repr__(self) -> str:
        return repr(self._call[0])

    def __reduce__(self) -> tuple[Any, ...]:
        buffer = io.BytesIO()
        _Pickler(buffer, protocol=5).dump(self._call)
        return _unpack, (buffer.getvalue(),)


def _unpack(content: bytes) -> Call:
    return Call(*cloudpickle.loads(content))


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        # The client of Spark Connect alone has no such class.
        kind = getattr(sys.modules.get("pyspark"), "Broadcast", None)
        if kind is not None and isinstance(obj, kind):
            return BroadcastValue, (obj.value,)
        return super().reducer_override(obj)
