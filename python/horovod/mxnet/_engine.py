"""Operations in MXNet's engine: the core's C functions that push them, called through ctypes.

MXNet's engine runs an operation when no other operation uses its arrays. Calls therefore return at once, and errors are
raised where an array is read.
"""

import ctypes
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

try:
    import mxnet as mx
except AttributeError as error:  # np.bool, which is gone since NumPy 1.24
    raise ImportError(
        f"MXNet cannot be imported in {sys.executable} ({error}); its last release works with NumPy 1.23: "
        "pip install numpy==1.23.5"
    ) from error
from mxnet.base import MXNetError

from horovod._core import registered_process_set
from horovod.common._c_functions import Operation
from horovod.common._reduction import Reduction
from horovod.common._signals import want_handlers_to_run
from horovod.common.basics import basics, drain_before_leaving

if mx.__version__.split(".")[:2] != ["1", "9"]:
    raise ImportError(
        f"horovod.mxnet works with MXNet 1.9, found {mx.__version__}: pip install mxnet==1.9.1 numpy==1.23.5"
    )


_core = basics.MPI_LIB_CTYPES
_core.horovod_mxnet_last_error.restype = ctypes.c_char_p
_push = _core.horovod_mxnet_push
_push.argtypes = [ctypes.POINTER(Operation), ctypes.c_void_p, ctypes.c_void_p]
_push.argtypes += [ctypes.c_size_t, ctypes.c_int]


def _check(status: int) -> None:
    if status != 0:
        raise MXNetError(_core.horovod_mxnet_last_error().decode())


_check(_core.horovod_mxnet_load(mx.base._LIB._name.encode()))
want_handlers_to_run()


@drain_before_leaving
def drain() -> None:
    """Wait until all operations in the engine have ended, with or without an error."""
    with suppress(MXNetError):
        mx.nd.waitall()


def push(
    kind: int,
    prefix: str,
    name: str,
    inputs: Sequence[Any],
    outputs: Sequence[Any] | None,
    reduction: Reduction,
    priority: int,
    *,
    root_rank: int = 0,
) -> None:
    """Push an allreduce or a broadcast of arrays in host memory; without `outputs` it works in place.

    Raises
    ------
    ValueError
        The process set is not registered.
    MXNetError
        An array has no shape yet.
    """
    operation = Operation(
        kind=kind,
        reduce_op=reduction.op,
        process_set=registered_process_set(reduction.process_set.process_set_id),
        root=root_rank,
        prefix=prefix.encode(),
        name=name.encode(),
        prescale=reduction.prescale_factor,
        postscale=reduction.postscale_factor,
    )
    handles = ctypes.c_void_p * len(inputs)
    sources = handles(*[array.handle for array in inputs])
    targets = None if outputs is None else handles(*[array.handle for array in outputs])
    _check(_push(operation, sources, targets, len(inputs), priority))
