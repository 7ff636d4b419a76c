"""`horovod.numpy` against the tables of tests/conformance."""

import numpy as np

import horovod.numpy as hvd
from conformance.adapter import COMPLEX, INTEGERS, Adapter, Fault, of_numpy
from conformance.suite import Conformance


def unaligned(array):
    memory = np.frombuffer(bytearray(1 + array.nbytes), np.uint8)[1:].view(array.dtype)
    memory = memory.reshape(array.shape)
    memory[...] = array
    return memory


LAYOUTS = {
    "transposed": lambda array: array.T.copy().T,
    "strided": lambda array: np.stack([array, array], -1)[..., 0],
    "reversed": lambda array: array[::-1].copy()[::-1],
    "byteswapped": lambda array: array.astype(array.dtype.newbyteorder()),
    "unaligned": unaligned,
    "masked": np.ma.array,
}
NO_TENSORS = {
    "text": (lambda: "text", Fault.NO_TENSOR, r"Expected a numpy\.ndarray, got str"),
    "object": (lambda: np.array([None]), Fault.DTYPE, "references to objects"),
    "mask": (lambda: np.ma.masked_array([1.0], mask=[1]), Fault.DTYPE, "lose its mask"),
}


class Numpy(Adapter):
    hvd = hvd
    dtypes = (*INTEGERS, "float16", "float32", "float64", "bool", *COMPLEX)
    splits = (list, tuple, np.array, lambda splits: np.array(splits, np.int32))
    layouts = LAYOUTS
    no_tensors = NO_TENSORS

    def make(self, values, dtype):
        return np.array(values)

    def read(self, tensor):
        return of_numpy(tensor)

    def place(self, tensor):
        return tensor.ctypes.data, tensor.strides


class TestNumpy(Conformance):
    adapters = (Numpy(),)
