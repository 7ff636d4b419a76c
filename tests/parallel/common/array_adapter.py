"""An adapter for Python's own `array.array`: all that a framework has to tell `horovod.common`, and nothing more."""

import ctypes
from array import array

from horovod.common._collectives import Collectives, Memory
from horovod.common._dtypes import CODES, OP_NAMES, can_be_reduced
from horovod.common._sampler import SampleDealer  # noqa: F401
from horovod.common._snapshot import never
from horovod.common._splits import checked_splits
from horovod.common._state_handlers import (
    HandledState,
    HandlerRegistry,
    SnapshotHandler,
    StateHandler,
)
from horovod.common.api import *  # noqa: F403
from horovod.common.elastic import run  # noqa: F401

DTYPES = {"b": "int8", "B": "uint8", "i": "int32", "q": "int64", "f": "float32", "d": "float64"}


def _exported(values):
    """Address of an array's memory, and what keeps it there: an array that exports its memory is not resized."""
    memory = (ctypes.c_char * (len(values) * values.itemsize)).from_buffer(values)
    return ctypes.addressof(memory), (values, memory)


class Arrays:
    """Arrays of numbers, of one dimension."""

    def describe(self, array_, op):
        if not isinstance(array_, array):
            raise TypeError(f"Expected an array.array, got {type(array_).__name__}.")
        dtype = DTYPES.get(array_.typecode, array_.typecode)
        if dtype not in CODES:
            raise ValueError(f"Arrays of {dtype!r} are not supported.")
        if op in OP_NAMES and not can_be_reduced(op, dtype):
            raise ValueError(f"Arrays of {dtype} are not supported for op {OP_NAMES[op]}.")
        address, owner = _exported(array_)
        nbytes, count = len(array_) * array_.itemsize, (len(array_),)
        kind = array_.typecode
        return Memory(address, nbytes, CODES[dtype], count, owner, kind, address, True)

    def check_writable(self, array_):
        pass

    def allocate(self, like):
        return _exported(array(like.dtype, bytes(like.nbytes)))

    def copy(self, memory):
        return _exported(memory.owner[0][:])

    def put(self, array_, memory):
        if not memory.is_own:
            array_[:] = memory.owner[0]

    def wrap(self, owner, dtype):
        return owner[0]

    def wrap_output(self, output, dtype):
        return array(dtype, bytes(output[0]))

    def rows(self, splits):
        return None if splits is None else checked_splits(list(splits))

    def counts(self, numbers, splits):
        return array("i", numbers)


collectives = Collectives(Arrays())


class _Copies:
    """Small as they are, no copy of them waits."""

    def copy(self, value, reused, name, may_wait=never):
        return value[:], None


class ArrayHandler(SnapshotHandler):
    """Of arrays, which are changed in place."""

    copies = _Copies()

    def state(self):
        return self.value

    def load(self, state):
        self.value[:] = state

    def sync(self):
        collectives.broadcast_(self.value, self.root_rank)


class TupleHandler(StateHandler):
    """Of tuples, which cannot be changed: the state gets others."""

    def __init__(self, value):
        super().__init__(value)
        self.save()

    def save(self):
        self.saved = self.value

    def restore(self):
        self.value = self.saved

    def set_value(self, value):
        self.value = value  # which is how they progress: it is not saved before the next commit

    def sync(self):
        self.value = broadcast_object(self.value, self.root_rank)  # noqa: F405


class ArrayState(HandledState):
    """State of arrays, tuples and plain objects."""

    _handler_registry = HandlerRegistry([(array, ArrayHandler), (tuple, TupleHandler)])
