"""Pickling of functions: a traceback on a rank names the file that the function comes from.

cloudpickle leaves the file's name out, and puts `<dynamic-code>` in its place.
"""

from __future__ import annotations

import io
from collections import ChainMap
from collections.abc import Callable
from types import CodeType
from typing import Any, ClassVar

import cloudpickle  # type: ignore[import-untyped]

_OF_CLOUDPICKLE: Any = cloudpickle.Pickler.dispatch_table


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's, which sends the names of files along."""

    dispatch_table: ClassVar[Any] = ChainMap(
        {CodeType: lambda code: _reduced(code)}, _OF_CLOUDPICKLE
    )


def dumps(obj: Any) -> bytes:
    """As `cloudpickle.dumps`; what loads it needs this package."""
    file = io.BytesIO()
    _Pickler(file, protocol=5).dump(obj)
    return file.getvalue()


def _reduced(code: CodeType) -> Any:
    make, args = _OF_CLOUDPICKLE[CodeType](code)[:2]
    return _of_file, (make, args, code.co_filename)


def _of_file(make: Callable[..., CodeType], args: tuple[Any, ...], file: str) -> CodeType:
    return make(*args).replace(co_filename=file)
