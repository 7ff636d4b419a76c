"""Names for our operations in what `torch.profiler` shows; only while a profiler runs.

Operations look at `profiler._is_profiler_enabled` themselves, which is all that they do for it where no profiler runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch.autograd.profiler import record_function

_T = TypeVar("_T")


profiler: Any = torch.autograd.profiler
"""The module whose flag tells whether a profiler runs; where PyTorch has no such flag, operations have no names."""
if not hasattr(profiler, "_is_profiler_enabled"):
    profiler = SimpleNamespace(_is_profiler_enabled=False)


class _Thread(threading.local):
    is_inside = False


_thread = _Thread()


def is_outermost() -> bool:
    """Whether this thread is in no operation of ours that is recorded already."""
    return not _thread.is_inside


def recorded(function: Callable[..., _T], *args: Any) -> _T:
    """Run a function under the name `horovod.` and its own; what it calls is not recorded by itself."""
    _thread.is_inside = True
    try:
        with record_function(f"horovod.{function.__name__}"):
            return function(*args)
    finally:
        _thread.is_inside = False
