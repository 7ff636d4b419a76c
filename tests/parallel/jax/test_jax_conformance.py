"""`horovod.jax` against the tables of tests/conformance: outside and inside of compiled programs.

All cases of an element type are one program.
"""

import jax
import jax.numpy as jnp

import horovod.jax as hvd
from conformance.adapter import Adapter, Extent, Fault, Form, Packing, of_numpy
from conformance.suite import Conformance

DTYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "float16", "bfloat16", "float32")
RAISED = (RuntimeError, ValueError)
FAULTS = dict.fromkeys(set(Fault) - {Fault.UNREGISTERED}, (*RAISED, TypeError))


class Eager(Adapter):
    mode = "eager"
    hvd = hvd
    dtypes = (*DTYPES, "bool", "complex64")
    forms = (Form.NEW, Form.GROUP)

    def make(self, values, dtype):
        return jnp.asarray(values).astype(dtype)

    def read(self, tensor):
        assert isinstance(tensor, jax.Array)
        return of_numpy(tensor)


class Compiled(Eager):
    mode = "jit"
    packing = Packing.ONE_ELEMENT_TYPE
    extent = Extent.KINDS
    faults = FAULTS
    # Sizes are known when the program is compiled, and names belong to one place of it.
    lacks = frozenset(("ragged", "uneven", "splits", "ragged in a set", "names same"))

    def run(self, program, tensors):
        return jax.block_until_ready(jax.jit(program)(tensors))


class TestJax(Conformance):
    adapters = (Eager(), Compiled())
