"""The interface of the suite to a framework: makes a tensor, reads one, runs a program of operations."""

from collections.abc import Mapping
from contextlib import nullcontext
from enum import Enum
from types import MappingProxyType

import numpy as np

from conformance import oracle
from horovod.common.exceptions import HorovodNotInitializedError

INTEGERS = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
FLOATS = ("float16", "bfloat16", "float32", "float64")
COMPLEX = ("complex64", "complex128")
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
NATIVE = (*INTEGERS, *FLOATS, "bool")
MOVABLE = (*NATIVE, *COMPLEX, *FLOAT8)


class Form(Enum):
    """The form of a call: prefix and suffix of the function's name."""

    NEW = ("", "")
    IN_PLACE = ("", "_")
    ASYNC = ("", "_async")
    ASYNC_IN_PLACE = ("", "_async_")
    GROUP = ("grouped_", "")
    GROUP_IN_PLACE = ("grouped_", "_")
    GROUP_ASYNC = ("grouped_", "_async")
    GROUP_ASYNC_IN_PLACE = ("grouped_", "_async_")

    def function(self, operation):
        """The name of the function."""
        return self.value[0] + operation + self.value[1]

    is_group = property(lambda self: bool(self.value[0]))
    is_in_place = property(lambda self: self.value[1].endswith("_"))
    is_async = property(lambda self: "async" in self.value[1])


class Fault(Enum):
    """The kinds of errors. Each adapter maps them to classes of exceptions."""

    DISAGREEMENT = "ranks ask for different things"
    ARGUMENT = "an argument that cannot be"
    TYPE = "an argument of a wrong type"
    DTYPE = "elements that cannot be combined, or not be sent"
    RESULT = "what the core refuses when it is asked"
    NOT_INITIALIZED = "no job"
    UNREGISTERED = "a process set that is not registered"
    NO_TENSOR = "what is no tensor"


class Packing(Enum):
    """How many cases are one program: as many as possible where compiling a program costs more than a case."""

    ONE_CASE = "one case"
    ONE_ELEMENT_TYPE = "all cases of an element type"


class Extent(Enum):
    """How much of the tables is tried."""

    EVERYTHING = "all rows and shapes"
    KINDS = "every kind of shape once, and not what the core computes alike for all"


class Adapter:
    """One framework in one mode. A subclass has `hvd`, `make` and `read`, and says what differs from the defaults."""

    mode = ""
    """Names the mode where a framework has several."""
    hvd = None
    """The module."""
    operations = None
    """The object that has the operations, if the module has not."""
    dtypes = MOVABLE
    """Element types that can be moved. Complex numbers and those of 8 bits are not combined by every operator."""
    forms = tuple(Form)
    packing = Packing.ONE_CASE
    extent = Extent.EVERYTHING
    lacks = frozenset()
    """Features that the framework lacks: operations, operators, names of rows, `row/operation`, `row/operator`,
    `operator/element type`, and ids of mistakes."""
    faults: Mapping = MappingProxyType({})
    splits = (list,)
    """Makers of what alltoall takes as splits, from a list."""
    layouts: Mapping = MappingProxyType({})
    """By name: makers of the same tensor, laid out differently in memory."""
    counts_mistakes = False
    """Whether a refused call advances the numbers of unnamed calls: then all ranks have to make it."""
    no_tensors: Mapping = MappingProxyType({})
    """By name: a maker of an object that is refused as a tensor, the fault, a regular expression of its text."""

    def make(self, values, dtype):
        """A tensor with these values."""
        raise NotImplementedError

    def read(self, tensor):
        """A tensor's values, and the name of its element type."""
        raise NotImplementedError

    def can_hold(self, shape):
        """Whether a tensor can have this shape."""
        return True

    def synchronize(self, handle):
        """The results of a handle."""
        return self.hvd.synchronize(handle)

    def place(self, tensor):
        """A tensor's address and layout, which operations in place must not change. None is not compared."""
        return None

    def run(self, program, tensors):
        """The results of a program of operations on these tensors."""
        return program(tensors)

    def has(self, *names):
        """Whether the framework has all features of these names."""
        return not any(name in self.lacks for name in names)

    def function(self, form, operation):
        """The function of a form, None if the framework has no such form of the operation."""
        if form not in self.forms:
            return None
        function = getattr(self.operations or self.hvd, form.function(operation), None)
        assert function or form is not Form.NEW, f"there is no {operation}"
        return function

    def beside(self, tensor):
        """A valid tensor for the group of an invalid one. 1 to 4 ranks can share its rows evenly."""
        return self.make(np.ones(12, "float32"), "float32")

    def around(self):
        """The context that calls need."""
        return nullcontext()

    def fault(self, fault):
        """The exceptions of a fault."""
        defaults = {
            Fault.DISAGREEMENT: self.hvd.HorovodInternalError,
            Fault.RESULT: self.hvd.HorovodInternalError,
            Fault.NOT_INITIALIZED: HorovodNotInitializedError,
            Fault.TYPE: TypeError,
            Fault.NO_TENSOR: TypeError,
        }
        return self.faults.get(fault, defaults.get(fault, ValueError))


def of_numpy(array):
    """`read` for arrays of NumPy and of `ml_dtypes`."""
    array = np.asarray(array)
    return array.astype(oracle.storage(array.dtype.name), copy=False), array.dtype.name
