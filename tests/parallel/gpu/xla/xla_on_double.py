"""Handlers for CUDA behind programs that XLA runs on the CPU, whose buffers pose as memory of the GPU double.

Frames, attributes, buffers and errors are XLA's own. A handler here has the call's buffers registered with the double
and the call told a stream of it, calls the core's handler for CUDA, and waits for the stream, for the program goes on
on the host.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import xla_frames
from double_streams import library

library.double_register.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
library.double_unregister.argtypes = (ctypes.c_void_p,)

# Bytes of an element, by XLA's code of its type; a token has none.
_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 10: 2, 11: 4, 12: 8, 15: 8, 16: 2, 17: 0}

# As XLA's, which makes a GPU's calls one after the other. The CPU's go on wherever something has ended.
_thread = ThreadPoolExecutor(1)
_kept: list[Any] = []
# Exceptions that would be lost in a function that C calls.
_problems: list[BaseException] = []
_count = 0


@contextlib.contextmanager
def some_calls() -> Iterator[None]:
    """In here at least one call goes to the GPU, and none goes wrong on its way there."""
    before = _count
    yield
    assert _problems == []
    assert _count > before, "nothing went to the GPU"


def handler(name: str, device: int) -> Any:
    """A function that XLA takes for the handler of this name for the CPU, such as `horovod_xla_allreduce`."""
    own = xla_frames.handler(name.replace("horovod_xla_", "horovod_xla_cuda_"))

    def run(frame: Any) -> int | None:
        if frame[0].extension_start or frame[0].stage != xla_frames.EXECUTE:
            return own(frame)
        try:
            return _thread.submit(_call, own, frame, device).result()
        except BaseException as problem:
            _problems.append(problem)
            raise

    function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(xla_frames.CallFrame))(run)
    _kept.append(function)
    return function


def _call(own: Any, frame: Any, device: int) -> int | None:
    global _count
    _count += 1
    spans = _spans(frame[0])
    frame[0].api = ctypes.addressof(_table(frame[0].api, device))
    assert not any(library.double_register(*span, device) for span in spans.items())
    error: int | None = own(frame)
    assert library.double_stream_synchronize(_stream(device)) == 0
    assert not any(map(library.double_unregister, spans))
    return error


def _spans(frame: xla_frames.CallFrame) -> dict[int, int]:
    """Addresses and lengths of the buffers of a call."""
    spans = {}
    for values in (frame.args, frame.rets):
        for i in range(values.size):
            buffer = xla_frames.Buffer.from_address(values.args[i])
            nbytes = _BYTES[buffer.dtype]
            for dim in buffer.dims[: buffer.rank]:
                nbytes *= dim
            if nbytes:
                spans[buffer.data] = nbytes
    return spans


@functools.cache
def _stream(device: int) -> Any:
    return library.double_stream_create(device)


@functools.cache
def _table(xlas: int, device: int) -> xla_frames.Api:
    """XLA's own table of functions, but for those that know of streams and GPUs."""
    content = ctypes.string_at(xlas, ctypes.sizeof(xla_frames.Api))
    table = xla_frames.Api.from_buffer_copy(content)
    assert table.struct_size >= ctypes.sizeof(xla_frames.Api)
    table.struct_size = ctypes.sizeof(xla_frames.Api)
    table.XLA_FFI_Stream_Get = _answer(xla_frames.StreamGetArgs, "stream", _stream(device))
    ordinal = _answer(xla_frames.DeviceOrdinalGetArgs, "device_ordinal", device)
    table.XLA_FFI_DeviceOrdinal_Get = ordinal
    return table


def _answer(structure: Any, field: str, value: Any) -> int | None:
    def answer(args: Any) -> None:
        setattr(args[0], field, value)

    function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(structure))(answer)
    _kept.append(function)
    return ctypes.cast(function, ctypes.c_void_p).value
