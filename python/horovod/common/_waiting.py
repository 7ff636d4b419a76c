"""Blocking calls: the result of a handle, a barrier, join."""

from typing import Any

from horovod import _core
from horovod.common import _job_events
from horovod.common.process_sets import ProcessSet, global_process_set


def synchronize(handle: int) -> Any:
    """Wait for an asynchronous operation and return its result; None if the handle has given it already.

    Raises
    ------
    TypeError
        Not a handle.
    HorovodNotInitializedError
        `hvd.shutdown()` was called before: the result is lost.
    HorovodInternalError
        The operation failed on all its ranks: they disagree about it, a rank was lost, or Horovod was shut down.
    """
    return _core.wait(handle)


def poll(handle: int) -> bool:
    """Whether an asynchronous operation is done, so that `synchronize` would not wait.

    Raises
    ------
    ValueError
        Unknown handle, or one that was synchronized already.
    """
    return _core.poll(handle)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every member of the process set has called this.

    Raises
    ------
    ValueError
        Not a member.
    HorovodInternalError
        A rank was lost, or Horovod is not initialised.
    """
    _core.barrier(process_set.process_set_id)


def join(device: int = -1) -> int:
    """Say that this rank has no more data, and wait until every rank said so.

    Meanwhile allreduces of the other ranks go on without this one: it contributes the identity of their
    operator. `Average` divides by the number of all ranks (`HOROVOD_JOIN_AVERAGE=contributors`: of those
    that are left). Operations that need its data, such as allgather, fail on the ranks that call them. Afterwards all
    ranks may go on, such as with the next epoch.

    Parameters
    ----------
    device
        Accepted for scripts written for GPUs; nothing is allocated here.

    Returns
    -------
    int
        The global rank that joined last, the same on every rank.

    Raises
    ------
    HorovodInternalError
        A rank was lost, or Horovod is not initialised.
    """
    del device
    last = _core.join()
    _job_events.note_join()
    return last
