"""One collective on arrays: in a traced program as a foreign call of XLA, otherwise at once, through host memory."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from horovod import _core
from horovod.common import _narrowing
from horovod.common._collectives import Collectives
from horovod.common._dtypes import CODES, OP_NAMES, REAL_OF, can_be_reduced
from horovod.common._numpy_arrays import NumpyArrays
from horovod.common._ops import Product, Sum
from horovod.common._reduction import Reduction
from horovod.common.process_sets import ProcessSet
from horovod.jax import _foreign_calls, _names

Arrays = tuple[Any, ...]

_X64 = (
    "JAX has no types of 64 bits here: jax.config.update('jax_enable_x64', True) at the beginning of the script turns "
    "them on; horovod.numpy needs no such setting."
)


@dataclass(frozen=True)
class Options:
    """Arguments of a collective beside its operands. Equal ones are equal keys of JAX's compiled programs."""

    name: str | None
    """None: numbered by the core, in the order of the calls."""
    process_set: ProcessSet
    op: int | None = None
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    is_recomputed: bool = False
    """Whether the call is in a function of `jax.checkpoint`."""
    is_nested: bool = False
    """Whether the call is in a function inside a program: a branch, a loop, an inner `jit`."""

    def of_gradient(self) -> "Options":
        """The same for the collective that differentiates this one."""
        return replace(self, name=None if self.name is None else f"{self.name}.gradient")

    def members(self) -> int:
        """How many ranks take part; ValueError for a process set that is not registered."""
        return len(_core.process_set_ranks(self.set_id()))

    def set_id(self) -> int:
        """The number of the process set; ValueError for one that is not registered."""
        return _core.registered_process_set(self.process_set.process_set_id)


@dataclass(frozen=True)
class Kind:
    """One kind of collective."""

    target: str
    """The function of the core that carries it out for XLA."""
    rows: Callable[[int, int], int] | None = None
    """Rows of a result, by those of the operand and the number of ranks; None: as the operand, whose memory the result
    takes where nobody else needs that, and a batch is one call."""


ALLREDUCE = Kind("horovod_xla_allreduce")
BROADCAST = Kind("horovod_xla_broadcast")
ALLGATHER = Kind("horovod_xla_allgather", lambda rows, members: rows * members)
ALLTOALL = Kind("horovod_xla_alltoall", lambda rows, _: rows)
REDUCESCATTER = Kind("horovod_xla_reducescatter", lambda rows, members: rows // members)

_collectives = Collectives(NumpyArrays())
_registered = False
_on_host: set[str] = set()


def call(kind: Kind, options: Options, operands: Arrays) -> Arrays:
    """Carry it out. Each operand has a result; all are combined, or none."""
    if any(isinstance(operand, jax.core.Tracer) for operand in operands):
        return _traced(kind, options, operands)
    results = _at_once(kind, options, tuple(_sent(operand) for operand in operands))
    return tuple(as_jax(*pair) for pair in zip(results, operands, strict=True))


def checked_constant(operand: Any) -> Any:
    """Return an operand of a traced program, where JAX would change a constant that needs 64 bits.

    Raises
    ------
    OverflowError
        The operand is such a constant.
    """
    if _narrowing.is_plain_number(operand):
        as_jax(np.asarray(operand), operand)
        return operand  # without a type of its own
    return as_jax(operand, operand) if isinstance(operand, np.ndarray | np.generic) else operand


def check_room(options: Options, operands: Arrays, *, in_program: bool) -> None:
    """Check Python's integers, and those of NumPy for which JAX has no type, before a sum or product of them.

    Raises
    ------
    OverflowError
        The result may wrap.
    """
    if options.op not in (Sum, Product):
        return
    reduction = Reduction(options.op, options.prescale, options.postscale, options.process_set)
    for operand in operands:
        if type(operand) is int or isinstance(operand, np.ndarray | np.generic):
            array = np.asarray(operand)
            narrow = jax.dtypes.canonicalize_dtype(array.dtype)
            if type(operand) is int or narrow != array.dtype:
                _narrowing.check_room(array, reduction, narrow if in_program else None)


def as_jax(value: Any, operand: Any) -> Any:
    """Return an array of NumPy as one of JAX, which has at most 32 bits unless `jax_enable_x64` is set.

    Raises
    ------
    OverflowError
        A number needs more bits.
    """
    return jnp.asarray(_narrowed(np.asarray(value), operand))


def _sent(operand: Any) -> Any:
    """The array to send. Integers keep 64 bits, which their sum may need. A sum of floats overflows to infinity."""
    array = np.asarray(operand)
    return array if array.dtype.kind in "iu" else _narrowed(array, operand)


def _narrowed(array: Any, operand: Any) -> Any:
    narrow = jax.dtypes.canonicalize_dtype(array.dtype)
    if narrow == array.dtype:
        return array
    with np.errstate(over="ignore"):
        kept = array.astype(narrow)
    is_plain = _narrowing.is_plain_number(operand)
    _narrowing.check_kept(array, kept, is_plain=is_plain, cure=_X64)
    return kept


def _traced(kind: Kind, options: Options, operands: Arrays) -> Arrays:
    _register()
    _core.size()  # the well-known error before init
    results = [_result(kind, options, operand) for operand in operands]
    # Where a name at several places of a program is refused; `_foreign_calls` knows where it is in order.
    checked = {} if options.is_recomputed else {"is_unordered": np.int32(1)}
    outputs = _foreign_calls.call(
        kind.target,
        None if kind.rows is None else tuple(tuple(result.shape) for result in results),
        options.is_nested,
        *operands,
        name=options.name or _names.of_call(operands),
        reduce_op=np.int32(options.op if options.op is not None else 1),
        prescale=np.float64(options.prescale),
        postscale=np.float64(options.postscale),
        process_set=np.int32(options.set_id()),
        root=np.int32(options.root),
        **checked,
    )
    return tuple(outputs)


def _result(kind: Kind, options: Options, operand: Any) -> jax.ShapeDtypeStruct:
    shape, dtype = jnp.shape(operand), jnp.result_type(operand)
    members = options.members()
    if dtype.name not in CODES and dtype.name not in REAL_OF:
        raise ValueError(
            f"Horovod cannot send arrays of dtype {dtype} from a compiled program; convert them, for example to "
            "float32 or, bit by bit, with jax.lax.bitcast_convert_type to uint8."
        )
    if (
        options.op is not None
        and options.op in OP_NAMES
        and not can_be_reduced(options.op, dtype.name)
    ):
        raise ValueError(
            f"Arrays of dtype {dtype} are not supported for op {OP_NAMES[options.op]}."
        )
    if kind.rows is None:
        return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]
    if not shape:
        raise ValueError(
            f"{_title(kind)} needs arrays of at least one dimension, got a scalar: x[None] makes one of it."
        )
    if kind in (REDUCESCATTER, ALLTOALL) and shape[0] % members:
        raise ValueError(
            f"{_title(kind)} inside a compiled program needs rows (dimension 0) that {members} ranks can share evenly, "
            f"got shape {shape}: pad it to a multiple of {members}, or call it outside of jit."
        )
    return jax.ShapeDtypeStruct((kind.rows(shape[0], members), *shape[1:]), dtype)  # type: ignore[no-untyped-call]


def _title(kind: Kind) -> str:
    return kind.target.removeprefix("horovod_xla_")


def _at_once(kind: Kind, options: Options, operands: Arrays) -> Arrays:
    its, name, members = _collectives, options.name, options.process_set
    scales = (options.prescale, options.postscale)
    if kind is ALLREDUCE:
        results = its.grouped_allreduce(operands, None, name, options.op, *scales, members)
    elif kind is ALLGATHER:
        results = its.grouped_allgather(operands, name, members)
    elif kind is REDUCESCATTER:
        results = its.grouped_reducescatter(operands, name, options.op, members, *scales)
    elif kind is ALLTOALL:
        results = tuple(alltoall_rows(operand, name, members) for operand in operands)
    else:
        results = broadcast_at_once(operands, options)
    return tuple(results)


def alltoall_rows(operand: Any, name: str | None, process_set: ProcessSet) -> Any:
    """Alltoall with equally many rows for each rank; the rows received."""
    return _collectives.alltoall(operand, None, name, process_set)


def alltoall_at_once(
    operand: Any, splits: Any, name: str | None, process_set: ProcessSet
) -> tuple[Any, Any]:
    """Alltoall with rows for each rank; the rows received, and how many came from each."""
    output, received = _collectives.alltoall(_sent(operand), np.asarray(splits), name, process_set)
    return as_jax(output, operand), jnp.asarray(received)


def broadcast_at_once(operands: Arrays, options: Options) -> Arrays:
    """Broadcast arrays of NumPy: all are under way together."""
    handles = [
        _collectives.broadcast_async(
            operand,
            options.root,
            None if options.name is None else f"{options.name}.{i}",
            options.process_set,
        )
        for i, operand in enumerate(operands)
    ]
    return tuple(_core.wait(handle) for handle in handles)


def register_for_host(target: str) -> None:
    """Tell XLA of one of the core's functions that only programs on the host call."""
    if target not in _on_host:
        handler = jax.ffi.pycapsule(getattr(ctypes.CDLL(_core.__file__), target))  # type: ignore[no-untyped-call]
        jax.ffi.register_ffi_target(target, handler, platform="cpu")
        _on_host.add(target)


def _register() -> None:
    """Tell XLA of the core's functions: by one name for each platform, of which XLA takes that of a program's.

    Nothing of CUDA is loaded here: XLA keeps what is registered for platforms that it does not have.
    """
    global _registered
    if _registered:
        return
    library = ctypes.CDLL(_core.__file__)
    for kind in (ALLREDUCE, BROADCAST, ALLGATHER, ALLTOALL, REDUCESCATTER):
        handler = jax.ffi.pycapsule(getattr(library, kind.target))  # type: ignore[no-untyped-call]
        jax.ffi.register_ffi_target(kind.target, handler, platform="cpu")
        on_cuda = kind.target.replace("horovod_xla_", "horovod_xla_cuda_")
        handler = jax.ffi.pycapsule(getattr(library, on_cuda))  # type: ignore[no-untyped-call]
        jax.ffi.register_ffi_target(kind.target, handler, platform="CUDA")
        elsewhere = jax.ffi.pycapsule(library.horovod_xla_elsewhere)  # type: ignore[no-untyped-call]
        jax.ffi.register_ffi_target(kind.target, elsewhere, platform="ROCM")
    # Handlers run on threads of XLA, and do not ask the interpreter.
    _core.prepare_gpus()
    _registered = True
