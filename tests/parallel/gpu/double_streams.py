"""The library of the GPU double (crates/horovod-gpu-double) and its streams, as `torch.cuda` has streams."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

# Whether the double stands for AMD's libraries, which the runtime finds below a home.
IS_ROCM = os.environ.get("HVD_TEST_GPU") == "rocm"
LIBRARY = (
    os.path.realpath(os.environ["HOROVOD_ROCM_HOME"] + "/lib/librccl.so.1")
    if IS_ROCM
    else os.environ["HOROVOD_CUDA_LIBRARY"]
)
_process = os.getpid()

_u64, _size, _int, _pointer = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
library = ctypes.CDLL(LIBRARY)
for _name, _result, _arguments in (
    ("double_alloc", _u64, (_int, _size)),
    ("double_free_on", _int, (_u64, _pointer)),
    ("double_stream_create", _pointer, (_int,)),
    ("double_stream_write", _int, (_pointer, _u64, _pointer, _size)),
    ("double_stream_read", _int, (_pointer, _pointer, _u64, _size)),
    ("double_stream_synchronize", _int, (_pointer,)),
    ("double_stream_gate", _u64, (_pointer,)),
    ("double_gate_open", None, (_u64,)),
    ("double_stream_begin_capture", _int, (_pointer, _int)),
    ("double_stream_end_capture", ctypes.c_int64, (_pointer,)),
    ("double_violations", _u64, (ctypes.c_char_p, _size)),
    ("double_counts", _u64, (ctypes.c_char_p,)),
    ("double_live", _u64, (ctypes.c_char_p,)),
):
    _function = getattr(library, _name)
    _function.restype, _function.argtypes = _result, _arguments


def is_own_process() -> bool:
    """Whether this is no forked child, which cannot use the double."""
    return os.getpid() == _process


def number_of_gpus() -> int:
    """How many this process sees; `environments.json` says it to the double."""
    return 4


def violations() -> list[str]:
    """Violations: uses without an order, after a free, or against a rule of CUDA or NCCL."""
    text = ctypes.create_string_buffer(1 << 16)
    count = library.double_violations(text, len(text))
    texts = text.value.decode(errors="replace").splitlines()
    return texts or [f"{count} violations without a text"] if count else []


def count(call: str) -> int:
    """How often a function of CUDA or NCCL was called in this process."""
    return int(library.double_counts(call.encode()))


def communicators() -> int:
    """How many communicators of NCCL this process has."""
    return int(library.double_live(b"communicators"))


def wait_for_communicators(left: int) -> None:
    """Wait until the runtime has freed all but so many, those of process sets that were removed.

    NCCL waits for the device when it frees one. A later test that holds the device back until the host has gone on
    would wait for ever.
    """
    deadline = time.monotonic() + 120.0
    while communicators() > left:
        assert time.monotonic() < deadline, f"{communicators()} communicators, expected {left}"
        threading.Event().wait(0.01)


# Functions of CUDA in which the host waits.
HOST_WAITS = ("cuEventSynchronize", "cuStreamSynchronize", "cuCtxSynchronize")


class Stream:
    """The result of `torch.cuda.current_stream`."""

    def __init__(self, device: int, address: int | None = None) -> None:
        self.device = device
        self.cuda_stream = library.double_stream_create(device) if address is None else address

    def synchronize(self) -> None:
        """Wait on the host; no function of CUDA's is counted."""
        call_double("double_stream_synchronize", self.cuda_stream)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """In the block nothing runs that is put on the stream, or that waits for it."""
        gate = library.double_stream_gate(self.cuda_stream)
        assert gate
        try:
            yield
        finally:
            library.double_gate_open(gate)

    @contextlib.contextmanager
    def captured(self) -> Iterator[None]:
        """Capture what is put on the stream, as into a CUDA graph; nothing may end the capture from outside."""
        call_double("double_stream_begin_capture", self.cuda_stream, 0)
        try:
            yield
        finally:
            assert library.double_stream_end_capture(self.cuda_stream) >= 0, "it was invalidated"


def call_double(name: str, *arguments: Any) -> None:
    """Call a function of the double's own, which must succeed."""
    if not is_own_process():
        # Where PyTorch refuses, the double would wait for a lock that nobody holds any more.
        raise RuntimeError("CUDA cannot be used in a forked process")
    code = getattr(library, name)(*arguments)
    assert code == 0, f"{name} returned {code}"


_current = threading.local()
# The default streams; only device 0's can be told by a null pointer, which means the current context's.
_defaults: dict[int, Stream] = {}


def default_stream(device: int) -> Stream:
    """The stream that is there from the start."""
    if device not in _defaults:
        _defaults[device] = Stream(device, None if device else 0)
    return _defaults[device]


def _streams() -> dict[int, Stream]:
    streams: dict[int, Stream] = _current.__dict__.setdefault("streams", {})
    return streams


def current_stream(device: Any = None) -> Stream:
    """This thread's stream of a device: the default stream unless `stream` says otherwise."""
    index = device.index if isinstance(device, torch.device) else device
    index = index or 0
    return _streams().get(index) or default_stream(index)


# Devices on which `torch.cuda` has made a context, which takes some 100 MB. Tests may forget them.
contexts: set[int] = set()


@contextlib.contextmanager
def device(of: int) -> Iterator[None]:
    """Have a device be this thread's current one; the former one gets no context by that."""
    before = _current.__dict__.get("device", 0)
    _current.device = of
    contexts.add(of)
    try:
        yield
    finally:
        _current.device = before


@contextlib.contextmanager
def stream(of: Stream) -> Iterator[None]:
    """Have this thread's work go to a stream, and its device be the current one.

    As in PyTorch, which comes back by `cudaSetDevice`: the former device has a context from then on.
    """
    before, own = current_stream(of.device), _current.__dict__.get("device", 0)
    _streams()[of.device], _current.device = of, of.device
    contexts.add(of.device)
    try:
        yield
    finally:
        _streams()[of.device], _current.device = before, own
        contexts.add(own)
