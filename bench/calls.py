"""Compiles calls.c and calls it: operations whose ends are calls, each of which submits the next."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("calls.c")
LIMIT_S = 60


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled adapter, with the functions of the core that this process has loaded."""
    import horovod
    from horovod import _core

    include = Path(horovod.__file__).parent / "include"
    # The library stays loaded when its file is gone.
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "calls.so"
        flags = ["-O2", "-shared", "-fPIC", "-pthread", "-Wall", "-Wextra", "-Werror"]
        words = ["gcc", *flags, f"-I{include}", str(SOURCE), "-o", str(out), "-ldl"]
        subprocess.run(words, check=True, timeout=LIMIT_S)
        adapter = ctypes.CDLL(str(out))
    adapter.calls_chain.argtypes = [
        ctypes.c_void_p,
        ctypes.c_uint64,
        ctypes.c_char_p,
        ctypes.c_int,
    ]
    if adapter.calls_open(_core.__file__.encode()) != 0:
        raise SystemExit("the C functions of the core were not found")
    return adapter


def chain(tensor: torch.Tensor, name: str, count: int) -> None:
    """Sum a float32 tensor in place so many times, one after the other."""
    adapter = library()
    if adapter.calls_chain(tensor.data_ptr(), tensor.numel(), name.encode(), count) != 0:
        raise SystemExit(f"{name}: an operation failed")
