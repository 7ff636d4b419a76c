"""Sending Python objects between ranks: pickled, through host memory, the same for every framework.

Only ranks that proved to hold the job's key are connected, so unpickling what they send is as safe as running
the script that they run.
"""

import ctypes
import io
import itertools
import pickle
from array import array
from collections.abc import Sequence
from typing import Any, TypeAlias

from horovod import _core
from horovod.common import _ops
from horovod.common._operations import start
from horovod.common._script_classes import Pickler
from horovod.common.process_sets import ProcessSet, global_process_set

_UINT8 = 0
_INT64 = 5

# Writable host memory.
_Memory: TypeAlias = "array[int] | bytearray | memoryview"


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the root's object on every rank, pickled with cloudpickle; of any size.

    Of a class that the script itself defines each rank gets an object of its own one.

    Parameters
    ----------
    obj
        The object to send; ignored on ranks other than the root.
    root_rank
        Global rank of the root, which gets back its own object, not a copy.
    name
        Pairs the call across ranks, for when several threads send objects at the same time.
    process_set
        The ranks that take part.

    Raises
    ------
    ValueError
        The root could not pickle its object (raised on all; on the root it is the pickler's own exception), or
        as in `broadcast`.
    HorovodInternalError
        As in `broadcast`.

    Examples
    --------
    >>> epoch = hvd.broadcast_object(epoch if hvd.rank() == 0 else None, root_rank=0)
    """
    name = name or "broadcast_object"
    is_root = _core.is_initialized() and _core.rank() == root_rank
    payload, failure = _pickled(obj) if is_root else (memoryview(b""), None)
    size = array("q", [-len(payload) if failure else len(payload)])
    _broadcast(size, _INT64, root_rank, f"{name}.sz", process_set)
    if not is_root:
        payload = memoryview(bytearray(abs(size[0])))
    _broadcast(payload, _UINT8, root_rank, f"{name}.t", process_set)
    if failure:
        raise failure
    if size[0] < 0:
        raise ValueError(f"Rank {root_rank} could not pickle its object: {pickle.loads(payload)}")
    return obj if is_root else pickle.loads(payload)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the list of all ranks' objects, in the order of ranks, pickled with cloudpickle.

    Parameters
    ----------
    obj
        The object to send; the own entry of the result is a copy too.
    name
        Pairs the call across ranks, for when several threads send objects at the same time.
    process_set
        The ranks that take part.

    Raises
    ------
    ValueError
        A rank could not pickle its object (raised on all; there it is the pickler's own exception), or as in
        `allgather`.
    HorovodInternalError
        As in `allgather`.
    """
    name = name or "allgather_object"
    payload, failure = _pickled(obj)
    own_size = array("q", [-len(payload) if failure else len(payload)])
    sizes = _allgather(own_size, _INT64, f"{name}.sz", process_set).cast("q")
    data = _allgather(payload, _UINT8, f"{name}.t", process_set)
    if failure:
        raise failure
    ends = itertools.accumulate(map(abs, sizes))
    parts = [data[end - abs(size) : end] for size, end in zip(sizes, ends, strict=True)]
    for member, size in enumerate(sizes):
        if size < 0:
            raise ValueError(
                f"Member {member} of the process set could not pickle its object: "
                f"{pickle.loads(parts[member])}"
            )
    return [pickle.loads(part) for part in parts]


def reduce_numbers(numbers: "array[int]", op: int, name: str, process_set: ProcessSet) -> None:
    """Reduce 64-bit integers over all members, in place."""
    kind = _core.ALLREDUCE
    _core.wait(_enqueue(kind, "allreduce", name, numbers, _INT64, True, -1, process_set, op))


def start_reducing_bytes(data: bytearray, op: int, name: str, process_set: ProcessSet) -> int:
    """Start to reduce bytes over all members, in place, and return the handle."""
    return _enqueue(_core.ALLREDUCE, "allreduce", name, data, _UINT8, True, -1, process_set, op)


def allgather_numbers(numbers: "array[int]", name: str, process_set: ProcessSet) -> list[int]:
    """Return the 64-bit integers of all members, one after the other in the order of ranks."""
    return _allgather(numbers, _INT64, name, process_set).cast("q").tolist()


def _pickled(obj: Any) -> tuple[memoryview, Exception | None]:
    """Pickle an object; if that fails, the text of the failure, so that no rank is left waiting for it."""
    stream = io.BytesIO()
    try:
        Pickler(stream, protocol=pickle.HIGHEST_PROTOCOL).dump(obj)
    except Exception as failure:
        text = pickle.dumps(f"{type(failure).__name__}: {failure}")
        return memoryview(bytearray(text)), failure
    return stream.getbuffer(), None


def _enqueue(
    kind: int,
    prefix: str,
    name: str,
    data: _Memory,
    code: int,
    in_place: bool,
    root_rank: int,
    process_set: ProcessSet,
    op: int = _ops.Sum,
) -> int:
    # ctypes gives the address and, as the owner, keeps the memory exported until the operation is done.
    memory = ctypes.c_char.from_buffer(data)
    address = ctypes.addressof(memory)
    entry = (address, address if in_place else 0, code, (len(data),), memory)
    set_id = process_set.process_set_id
    return start(kind, prefix, name, (entry,), set_id, op=op, root_rank=root_rank)


def _broadcast(
    data: _Memory, code: int, root_rank: int, name: str, process_set: ProcessSet
) -> None:
    kind = _core.BROADCAST
    _core.wait(_enqueue(kind, "broadcast", name, data, code, True, root_rank, process_set))


def _allgather(data: _Memory, code: int, name: str, process_set: ProcessSet) -> memoryview:
    kind = _core.ALLGATHER
    outputs: Sequence[Any] = _core.wait(
        _enqueue(kind, "allgather", name, data, code, False, -1, process_set)
    )
    return memoryview(outputs[0][0]).cast("B")
