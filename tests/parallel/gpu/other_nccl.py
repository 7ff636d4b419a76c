"""A second user of NCCL in these processes, as `torch.distributed` may be: its own communicator, of the double's."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from double_streams import Stream, library

_FLOAT32, _SUM = 7, 0
_Handle, _int = ctypes.c_void_p, ctypes.c_int


class _UniqueId(ctypes.Structure):
    # As `ncclUniqueId`, which is passed by value.
    _fields_ = (("internal", ctypes.c_byte * 128),)


library.cuCtxSetCurrent.argtypes = (_Handle,)
library.ncclCommInitRank.argtypes = (ctypes.POINTER(_Handle), _int, _UniqueId, _int)
library.ncclCommDestroy.argtypes = (_Handle,)
library.ncclAllReduce.argtypes = (
    *(_Handle, _Handle, ctypes.c_size_t, _int, _int),
    *(_Handle, _Handle),
)


def call(name: str, *arguments: object) -> None:
    """Call a function of CUDA or NCCL, which must succeed."""
    code = getattr(library, name)(*arguments)
    assert code == 0, f"{name} returned {code}"


def current_context() -> int | None:
    """The context of this thread, which says its current device."""
    context = _Handle()
    call("cuCtxGetCurrent", ctypes.byref(context))
    return context.value


@contextmanager
def current_device(device: int) -> Iterator[None]:
    """In the block this is the thread's current device, as after `torch.cuda.set_device`."""
    call("cuInit", 0)
    before, context = current_context(), _Handle()
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    try:
        yield
    finally:
        call("cuCtxSetCurrent", before)
        call("cuDevicePrimaryCtxRelease_v2", device)


def bytes_in_use(device: int) -> int:
    """Memory that is allocated on a GPU, whoever uses it."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    with current_device(device):
        call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    return total.value - free.value


def unique_id() -> bytes:
    """The id by which the members of a new communicator find each other."""
    made = _UniqueId()
    call("ncclGetUniqueId", ctypes.byref(made))
    return bytes(made)


class OtherUser:
    """A member of a communicator of its own, on the current device."""

    def __init__(self, rank: int, size: int, identity: bytes) -> None:
        self._communicator = _Handle()
        its = _UniqueId.from_buffer_copy(identity)
        call("ncclCommInitRank", ctypes.byref(self._communicator), size, its, rank)

    def all_reduce_(self, tensor: torch.Tensor, on: Stream) -> None:
        """Put the sum of float32 tensors, in place, on a stream."""
        at, elements = tensor.data_ptr(), tensor.numel()
        call("ncclAllReduce", at, at, elements, _FLOAT32, _SUM, self._communicator, on.cuda_stream)

    def close(self) -> None:
        """Leave the communicator, with all others."""
        call("ncclCommDestroy", self._communicator)
