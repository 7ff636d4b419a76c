"""Handles of operations in flight: waiting for them, and keeping `torch.compile` out."""

import operator
from collections.abc import Callable
from typing import Any, SupportsIndex, TypeVar

import torch
from torch.compiler import is_dynamo_compiling

from horovod import _core
from horovod.torch._profiling import is_outermost, profiler, recorded

wait = _core.wait

_T = TypeVar("_T")


def eagerly(fn: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
    """Run a function as ordinary Python from inside a graph that `torch.compile` captures, which it splits.

    The public functions call this where `is_dynamo_compiling()` is true. Decorating them with
    `torch.compiler.disable` instead would import the compiler, a second per process, for everybody.
    """
    return torch.compiler.disable(fn)(*args, **kwargs)  # type: ignore[no-untyped-call, no-any-return]


def synchronize(handle: int) -> Any:
    """Wait for an asynchronous operation and return its result.

    The result is a tensor (for in-place operations the very object that was passed), a tuple of tensors for
    grouped operations, `(output, received_splits)` for alltoall. Other Python threads run meanwhile. Each
    handle gives its result once; a second call returns None.

    Raises
    ------
    TypeError
        Not a handle, but for example the tensor that an operation returned.
    HorovodNotInitializedError
        `hvd.shutdown()` was called before: the result is lost, also after another `hvd.init()`.
    HorovodInternalError
        The operation failed on all its ranks: they disagree about it (the message names the tensor and both
        values), a rank was lost, or Horovod was shut down.
    RuntimeError
        The tensor of an in-place operation was given other memory while the operation was in flight.
    """
    if is_dynamo_compiling():
        return eagerly(synchronize, handle)
    if profiler._is_profiler_enabled and is_outermost():
        return recorded(synchronize, handle)
    if type(handle) is not int:
        handle = _number(handle)
    return wait(handle)


def _number(handle: Any) -> int:
    if isinstance(handle, SupportsIndex) and not isinstance(handle, torch.Tensor):
        return operator.index(handle)
    given = "a tensor" if isinstance(handle, torch.Tensor) else f"{handle!r:.200}"
    if callable(handle):
        given = "the function that sparse_allreduce_async returns: call it to have its result"
    raise TypeError(
        f"hvd.synchronize() takes the handle that an operation with `_async` in its name has returned, not {given}."
        " The other operations have waited already when they return."
    )
