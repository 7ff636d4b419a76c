"""The least of adapters against the tables of tests/conformance."""

from array import array

import array_adapter as hvd
import numpy as np

from conformance.adapter import Adapter, Fault
from conformance.suite import Conformance
from horovod.common._waiting import synchronize

CODES = {dtype: code for code, dtype in hvd.DTYPES.items()}

NO_TENSORS = {
    "list": (lambda: [1], Fault.NO_TENSOR, r"Expected an array\.array, got list"),
    "text": (lambda: array("u", "text"), Fault.DTYPE, "not supported"),
}


class Arrays(Adapter):
    """Of one dimension."""

    hvd = hvd
    operations = hvd.collectives
    dtypes = tuple(CODES)
    splits = (list, tuple)
    no_tensors = NO_TENSORS

    def can_hold(self, shape):
        return len(shape) == 1

    def make(self, values, dtype):
        return array(CODES[dtype], values.tobytes())

    def read(self, tensor):
        dtype = hvd.DTYPES[tensor.typecode]
        return np.array(tensor, dtype), dtype

    def synchronize(self, handle):
        return synchronize(handle)


class TestArrays(Conformance):
    adapters = (Arrays(),)
