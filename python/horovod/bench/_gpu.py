"""Memory, a stream and timing events of one GPU, through CUDA's driver library alone: no framework is needed."""

import ctypes
from collections.abc import Sequence
from typing import Any, Final

from horovod import _core
from horovod.bench._data import Memory
from horovod.common._operations import Allocation, Gpu

_NON_BLOCKING: Final = 1  # streams that do not wait for the default one

_int, _pointer, _address, _size = ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t
_FUNCTIONS: Final[dict[str, tuple[Any, ...]]] = {
    "cuInit": (ctypes.c_uint,),
    "cuGetErrorString": (_int, _pointer),
    "cuDeviceGetCount": (_pointer,),
    "cuDeviceGet": (_pointer, _int),
    "cuDevicePrimaryCtxRetain": (_pointer, _int),
    "cuCtxSetCurrent": (_pointer,),
    "cuStreamCreateWithPriority": (_pointer, ctypes.c_uint, _int),
    "cuStreamSynchronize": (_pointer,),
    "cuMemAlloc_v2": (_pointer, _size),
    "cuMemFree_v2": (_address,),
    "cuMemcpyHtoDAsync_v2": (_address, _pointer, _size, _pointer),
    "cuMemcpyDtoHAsync_v2": (_pointer, _address, _size, _pointer),
    "cuEventCreate": (_pointer, ctypes.c_uint),
    "cuEventRecord": (_pointer, _pointer),
    "cuEventElapsedTime": (_pointer, _pointer, _pointer),
    "cuEventDestroy_v2": (_pointer,),
}


class GpuError(Exception):
    """A GPU cannot be used; the text says why."""


class Device:
    """One GPU, whose primary context is current on the calling thread from now on."""

    def __init__(self, local_rank: int) -> None:
        found = _core.gpu_libraries()["cuda"]
        if isinstance(found, str):
            raise GpuError(found)
        self._library = ctypes.CDLL(found[0])
        for name, arguments in _FUNCTIONS.items():
            function = getattr(self._library, name)
            function.restype, function.argtypes = _int, arguments
        self.call("cuInit", 0)
        count = self._get("cuDeviceGetCount", _int())
        if not count:
            raise GpuError("CUDA knows no GPU here; see CUDA_VISIBLE_DEVICES")
        self.ordinal = local_rank % count
        device = self._get("cuDeviceGet", _int(), self.ordinal)
        self._context = self._get("cuDevicePrimaryCtxRetain", _pointer(), device)
        self.call("cuCtxSetCurrent", self._context)
        self._stream = self._get("cuStreamCreateWithPriority", _pointer(), _NON_BLOCKING, 0)
        self._streams = _core.Streams(type(self), lambda _: self._stream)

    def place(self, element_bytes: int) -> Gpu:
        """Where operands are, and what gives memory for results of one dimension."""

        def allocate(shape: Sequence[int]) -> Allocation:
            memory = self.memory(shape[0] * element_bytes)
            return memory.address, memory

        return Gpu(self._streams, self.ordinal, lambda _: allocate)

    def _get(self, name: str, into: Any, *arguments: Any) -> Any:
        self.call(name, ctypes.byref(into), *arguments)
        return into.value

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver.

        Raises
        ------
        GpuError
            With the driver's words.
        """
        code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            why = (text.value or b"unknown error").decode()
            raise GpuError(f"{name} returned {code}: {why}")

    def memory(self, nbytes: int) -> "GpuMemory":
        """New memory of this GPU, with any content."""
        # A result is asked for by a thread of the core's, and may end on one.
        self.call("cuCtxSetCurrent", self._context)
        return GpuMemory(self, self._get("cuMemAlloc_v2", _address(), max(nbytes, 1)), nbytes)

    def free(self, address: int) -> None:
        """Give memory back."""
        self.call("cuCtxSetCurrent", self._context)
        self.call("cuMemFree_v2", address)

    def copy(self, name: str, *arguments: Any) -> None:
        """Copy between host and GPU, and wait for it."""
        self.call(name, *arguments, self._stream)
        self.call("cuStreamSynchronize", self._stream)

    def mark(self) -> "Mark":
        """A point in time on the stream."""
        event = self._get("cuEventCreate", _pointer(), 0)
        self.call("cuEventRecord", event, self._stream)
        return Mark(self, event)

    def seconds_between(self, begin: "Mark", end: "Mark") -> float:
        """Time from one to the other; waits until both have been reached."""
        self.call("cuStreamSynchronize", self._stream)
        milliseconds: float = self._get(
            "cuEventElapsedTime", ctypes.c_float(), begin.event, end.event
        )
        return milliseconds / 1e3


class Mark:
    """An event with the time."""

    def __init__(self, device: Device, event: int) -> None:
        self._device, self.event = device, event

    def __del__(self) -> None:
        self._device.call("cuEventDestroy_v2", self.event)


class GpuMemory(Memory):
    """Memory of a GPU, and as much of the host's from which it is filled and into which it is read."""

    def __init__(self, device: Device, address: int, nbytes: int) -> None:
        super().__init__(max(nbytes, 1))
        self._device, self._nbytes = device, nbytes
        self._host, self._on_host = self.address, self.view
        self.address = address

    def fill(self, offset: int, length: int, period: bytes) -> None:
        """Repeat a period over part of the memory."""
        super().fill(offset, length, period)
        self._device.copy(
            "cuMemcpyHtoDAsync_v2", self.address + offset, self._host + offset, length
        )

    def content(self) -> memoryview:
        """The bytes of the buffer, in host memory."""
        self._device.copy("cuMemcpyDtoHAsync_v2", self._host, self.address, self._nbytes)
        return self._on_host[: self._nbytes]

    def __del__(self) -> None:
        self._device.free(self.address)
