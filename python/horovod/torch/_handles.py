"""Handles of operations in flight: what each will return, waiting for it, and keeping `torch.compile` out."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

import torch
from torch.compiler import is_dynamo_compiling

from horovod import _core
from horovod.common.exceptions import HorovodInternalError

_T = TypeVar("_T")

_wait = _core.wait

# Result of each operation that was not waited for yet. Holding it keeps the memory alive.
_handle_map: dict[int, Any] = {}


class _HoldsOperations(Protocol):
    def _hvd_forget_job(self) -> None: ...


# Objects that remember operations of the running job.
_holders: "weakref.WeakSet[_HoldsOperations]" = weakref.WeakSet()


class Deferred:
    """A result that is put together from what the core returns, when the operation is waited for."""

    __slots__ = ("finish",)

    def __init__(self, finish: Callable[[Any], Any]) -> None:
        self.finish = finish


def remember_until_job_ends(holder: _HoldsOperations) -> None:
    """Have an object told when the job is over whose operations it remembers."""
    _holders.add(holder)


def forget_job() -> None:
    """Drop what belonged to a job that is over: its handles, and what optimizers had begun."""
    _handle_map.clear()
    for holder in list(_holders):
        holder._hvd_forget_job()


def eagerly(fn: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
    """Run a function as ordinary Python from inside a graph that `torch.compile` captures, which it splits.

    The public functions call this where `is_dynamo_compiling()` is true. Decorating them with
    `torch.compiler.disable` instead would import the compiler, a second per process, for everybody.
    """
    return torch.compiler.disable(fn)(*args, **kwargs)  # type: ignore[no-untyped-call, no-any-return]


def poll(handle: int) -> bool:
    """Whether an asynchronous operation is done, so that `synchronize` would not wait.

    Raises
    ------
    ValueError
        Unknown handle, or one that was synchronized already.
    """
    return _core.poll(handle)


def synchronize(handle: int) -> Any:
    """Wait for an asynchronous operation and return its result.

    The result is a tensor (for in-place operations the very object that was passed), a tuple of tensors for
    grouped operations, `(output, received_splits)` for alltoall. Other Python threads run meanwhile. Each
    handle gives its result once; a second call returns None.

    Raises
    ------
    HorovodInternalError
        The operation failed on all its ranks: they disagree about it (the message names the tensor and both
        values), a rank was lost, or Horovod was shut down.
    """
    if is_dynamo_compiling():
        return eagerly(synchronize, handle)
    result = _handle_map.pop(handle, None)
    if result is None:
        return None
    try:
        outputs = _wait(handle)
    except KeyboardInterrupt:
        _handle_map[handle] = result
        raise
    if type(result) is Deferred:
        return result.finish(outputs)
    return result


def synchronize_all(handles: Iterable[int]) -> None:
    """Wait for several operations, and only then raise what failed first: none may still write into a tensor."""
    failure = None
    for handle in handles:
        try:
            synchronize(handle)
        except HorovodInternalError as error:
            failure = failure or error
    if failure is not None:
        raise failure
