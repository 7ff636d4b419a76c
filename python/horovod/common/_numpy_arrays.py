"""How a NumPy array is presented to the core."""

from typing import Any

import numpy as np

from horovod.common import _narrowing
from horovod.common._collectives import Collectives, Memory
from horovod.common._dtypes import CODES, OP_NAMES, REAL_OF, can_be_reduced
from horovod.common._operations import Allocation, Output
from horovod.common._reduction import Reduction
from horovod.common._splits import checked_splits

Array = np.ndarray[Any, Any]


def _wire_dtype(dtype: Any) -> Any:
    """The type in which elements travel: pairs of reals for complex numbers, bytes for what the core does not know."""
    if dtype.name in CODES:
        return dtype
    return np.dtype(REAL_OF.get(dtype.name, np.uint8))


class NumpyArrays:
    """Arrays of any layout, of numbers, of `ml_dtypes`' kinds, and, where they are only copied, of any fixed size."""

    def describe(self, array: Any, op: int | None) -> Memory:
        if not isinstance(array, np.ndarray | np.generic | int | float | complex | list):
            raise TypeError(f"Expected a numpy.ndarray, got {type(array).__name__}.")
        if type(array) is not np.ndarray and np.ma.is_masked(array):
            raise ValueError(
                "A masked array would lose its mask, and what that hides would count: pass array.filled(value)."
            )
        given = np.asarray(array)
        dtype = given.dtype
        if dtype.hasobject:
            raise ValueError(
                f"Arrays of dtype {dtype} hold references to objects; see broadcast_object."
            )
        if op is not None and op in OP_NAMES and not can_be_reduced(op, dtype.name):
            raise ValueError(f"Arrays of dtype {dtype} are not supported for op {OP_NAMES[op]}.")
        native = dtype.newbyteorder("=")
        wire = np.require(given, native, ["C", "A"])
        origin = array.ctypes.data if isinstance(array, np.ndarray) else None
        wire = wire[...]  # a view, for an array that somebody views cannot be resized
        wire_dtype = _wire_dtype(native)
        if wire_dtype != native:
            wire = wire[..., np.newaxis].view(wire_dtype)
        address, code = wire.ctypes.data, CODES[wire_dtype.name]
        return Memory(address, wire.nbytes, code, wire.shape, wire, native, origin, given.ndim > 0)

    def check_writable(self, array: Any) -> None:
        if not isinstance(array, np.ndarray):
            raise TypeError(f"Expected a numpy.ndarray, got {type(array).__name__}.")
        if not array.flags.writeable:
            raise ValueError(
                "The array is read-only: pass a copy() of it, or use the form that returns a new one."
            )

    def allocate(self, like: Memory) -> Allocation:
        wire = np.empty(like.shape, like.owner.dtype)
        return wire.ctypes.data, wire

    def copy(self, memory: Memory) -> Allocation:
        wire = memory.owner.copy()
        return wire.ctypes.data, wire

    def put(self, array: Array, memory: Memory) -> None:
        if not memory.is_own:
            array[...] = _typed(memory.owner, memory.dtype)

    def wrap(self, owner: Array, dtype: Any) -> Array:
        return _typed(owner, dtype)

    def wrap_output(self, output: Output, dtype: Any) -> Array:
        buffer, shape = output
        wire_dtype = _wire_dtype(dtype)
        flat = np.frombuffer(buffer, wire_dtype) if len(buffer) else np.empty(0, wire_dtype)
        return _typed(flat.reshape(shape), dtype)

    def rows(self, splits: Any) -> list[int] | None:
        return None if splits is None else checked_splits(splits)

    def counts(self, numbers: list[int], splits: Any) -> Array:
        return np.array(numbers, np.int32)


class NumpyCollectives(Collectives[Array]):
    """Operations on arrays, and on Python's numbers, to which NumPy gives 64 bits."""

    def __init__(self) -> None:
        super().__init__(NumpyArrays())

    def _operand(self, array: Any, reduction: Reduction | None) -> Memory:
        if reduction is not None and isinstance(array, int | list):
            integers = _narrowing.python_integers(array)
            if integers is not None:
                _narrowing.check_room(integers, reduction)
        return super()._operand(array, reduction)


def _typed(wire: Array, dtype: Any) -> Array:
    """Undo what `describe` made of element types that the core does not know."""
    return wire if wire.dtype == dtype else wire.view(dtype)[..., 0]
