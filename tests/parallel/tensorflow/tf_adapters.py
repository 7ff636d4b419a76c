"""`horovod.tensorflow` as tests/conformance asks for it: eagerly, in functions, in sessions, compiled by XLA.

Where functions are traced or compiled, all cases of an element type are one program.
"""

import tensorflow as tf

import horovod.tensorflow as hvd
from conformance.adapter import NATIVE, Adapter, Extent, Fault, Form, Packing, of_numpy

errors = tf.errors
FAULTS = {
    Fault.DISAGREEMENT: errors.FailedPreconditionError,
    Fault.NOT_INITIALIZED: (errors.FailedPreconditionError, hvd.HorovodInternalError),
    Fault.ARGUMENT: (errors.InvalidArgumentError, TypeError, ValueError),
    Fault.RESULT: (errors.OpError, ValueError),
    Fault.DTYPE: (errors.InvalidArgumentError, TypeError),
    Fault.NO_TENSOR: (errors.InvalidArgumentError, TypeError),
}
NO_TENSORS = {"text": (lambda: tf.constant(["text"]), Fault.NO_TENSOR, "allowed values")}


class Eager(Adapter):
    mode = "eager"
    hvd = hvd
    dtypes = NATIVE
    forms = (Form.NEW, Form.GROUP)
    faults = FAULTS
    no_tensors = NO_TENSORS
    # A group has one element type; of an empty one the result is an empty list.
    lacks = frozenset(
        ("mixed", "in a set/Adasum", "allreduce-empty_group", "reducescatter-empty_group")
    )
    splits = (list, lambda splits: tf.constant(splits, tf.int32))

    def make(self, values, dtype):
        return tf.cast(tf.constant(values), dtype)

    def read(self, tensor):
        return of_numpy(tensor.numpy() if tf.is_tensor(tensor) else tensor)

    def beside(self, tensor):
        return tf.ones(12, tensor.dtype) if tensor.dtype != tf.string else tf.identity(tensor)


class Function(Eager):
    mode = "function"
    packing = Packing.ONE_ELEMENT_TYPE
    extent = Extent.KINDS
    options = {}  # noqa: RUF012

    def run(self, program, tensors):
        def flat(*its):
            return program(tf.nest.pack_sequence_as(tensors, its))

        return tf.function(flat, autograph=False, **self.options)(*tf.nest.flatten(tensors))


class Session(Function):
    mode = "session"

    def run(self, program, tensors):
        flat = [tensor.numpy() for tensor in tf.nest.flatten(tensors)]
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            inputs = [tf.compat.v1.placeholder(t.dtype, t.shape) for t in flat]
            outputs = program(tf.nest.pack_sequence_as(tensors, inputs))
            return session.run(outputs, dict(zip(inputs, flat, strict=True)))


class Compiled(Function):
    mode = "jit"
    dtypes = tuple(dtype for dtype in NATIVE if dtype not in ("uint32", "uint64"))
    options = {"jit_compile": True}  # noqa: RUF012
    # Sizes are known when the program is compiled, and names belong to one place of it.
    lacks = Eager.lacks | {
        "no tensor text",
        "alltoall",
        "ragged",
        "uneven",
        "ragged in a set",
        "names same",
    }
