"""How an MXNet array is presented to the core where the caller waits for the result."""

import ctypes
from collections.abc import Sequence
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.base import _LIB, check_call
from mxnet.ndarray.sparse import BaseSparseNDArray

from horovod.common._collectives import Memory
from horovod.common._dtypes import CODES
from horovod.common._operations import Output
from horovod.common._splits import checked_splits

NDArray = Any  # MXNet has no types


def checked(array: NDArray) -> NDArray:
    """Return the array; AssertionError unless it is a dense one of MXNet's."""
    if isinstance(array, mx.nd.NDArray) and not isinstance(array, BaseSparseNDArray):
        return array
    raise AssertionError(f"Expected a dense mxnet.nd.NDArray, got {type(array).__name__}.")


def on_gpu(array: NDArray) -> bool:
    """Whether the array is in the memory of a GPU."""
    return bool(array.ctx.device_type == "gpu")


def empty(shape: Sequence[int], context: Any, dtype: Any) -> NDArray:
    """Return an array with any content, also one without dimensions or without elements."""
    if shape and 0 not in shape:
        return mx.nd.empty(shape, context, dtype)
    with mx.util.np_shape(True):
        return mx.nd.empty(shape, context, dtype)


class MxnetArrays:
    """Arrays of all types, on all devices; the core sees host memory."""

    def describe(self, array: NDArray, op: int | None) -> Memory:
        del op  # the core knows what cannot be computed
        host = array.as_in_context(mx.cpu()) if on_gpu(checked(array)) else array
        host.wait_to_read()
        address = ctypes.c_void_p()
        check_call(_LIB.MXNDArrayGetData(host.handle, ctypes.byref(address)))
        dtype = np.dtype(host.dtype)
        name = "bfloat16" if dtype.names else dtype.name  # MXNet's is a structure of one number
        at, nbytes = address.value or 0, host.size * dtype.itemsize
        placed = (host.dtype, array.ctx)
        return Memory(at, nbytes, CODES[name], host.shape, host, placed, at, bool(host.shape))

    def wrap_output(self, output: Output, dtype: Any) -> NDArray:
        (element, context), (buffer, shape) = dtype, output
        array = empty(shape, mx.cpu() if context.device_type == "gpu" else context, element)
        if len(buffer):
            memory = (ctypes.c_char * len(buffer)).from_buffer(buffer)
            check_call(_LIB.MXNDArraySyncCopyFromCPU(array.handle, memory, array.size))
        return array.as_in_context(context)

    def rows(self, splits: Any) -> list[int] | None:
        if isinstance(splits, mx.nd.NDArray):
            splits = splits.asnumpy()
        return None if splits is None else checked_splits(splits)

    def counts(self, numbers: list[int], splits: Any) -> NDArray:
        return mx.nd.array(numbers, mx.cpu(), np.int32)
