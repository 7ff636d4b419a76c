"""`horovod.mxnet` against the tables of tests/conformance."""

import mxnet as mx
import numpy as np

import horovod.mxnet as hvd
from conformance.adapter import Adapter, Fault, Form, of_numpy
from conformance.suite import Conformance

# Results come later, and so do errors, as MXNet's own.
FAULTS = {
    Fault.DISAGREEMENT: mx.MXNetError,
    Fault.NOT_INITIALIZED: mx.MXNetError,
    Fault.ARGUMENT: (mx.MXNetError, ValueError),
    Fault.RESULT: (mx.MXNetError, AssertionError),
    Fault.DTYPE: (mx.MXNetError, ValueError),
    Fault.NO_TENSOR: AssertionError,
}
NO_TENSORS = {
    "array": (lambda: np.ones(3), Fault.NO_TENSOR, "dense mxnet"),
    "sparse": (lambda: mx.nd.ones((3,)).tostype("row_sparse"), Fault.NO_TENSOR, "dense mxnet"),
}


class MXNet(Adapter):
    hvd = hvd
    dtypes = ("uint8", "int8", "int32", "int64", "float16", "float32", "float64", "bool")
    forms = (Form.NEW, Form.IN_PLACE, Form.GROUP, Form.GROUP_IN_PLACE)
    faults = FAULTS
    no_tensors = NO_TENSORS
    counts_mistakes = True
    splits = (list, lambda splits: mx.nd.array(splits, dtype="int32"))
    # Operations wait in the engine: one name at a time is for scripts that wait themselves.
    lacks = frozenset(
        ("Adasum", "names same", "empty group", "name is a number", "root is no member")
    )

    def around(self):
        return mx.util.np_shape(True)

    def make(self, values, dtype):
        return mx.nd.array(values, dtype=dtype)

    def read(self, tensor):
        assert type(tensor) is mx.nd.NDArray
        return of_numpy(tensor.asnumpy())


class TestMXNet(Conformance):
    adapters = (MXNet(),)
