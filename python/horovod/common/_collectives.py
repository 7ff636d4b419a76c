"""Every collective operation on the arrays of any framework, in terms of the few things that the framework tells.

An adapter hands an `Arrays` to `Collectives` and publishes its methods; one with automatic differentiation builds on
those that give handles. (PyTorch's passes a tensor that needs no preparation to the core in fewer steps, by itself.)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from horovod import _core
from horovod.common._operations import (
    Allocate,
    Allocation,
    Entry,
    Gpu,
    Output,
    later_sharers,
    start,
)
from horovod.common._ops import Average, Sum, resolve_op
from horovod.common._reduction import Reduction
from horovod.common.exceptions import HorovodInternalError
from horovod.common.process_sets import ProcessSet, global_process_set

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_NO_ROWS = "Reducescatter does not support scalar inputs."


@dataclass(slots=True)
class Memory:
    """Contiguous memory that holds an array's values, in a type that the core knows."""

    address: int
    nbytes: int
    code: int
    shape: Sequence[int]
    owner: Any
    """Keeps the memory alive."""
    dtype: Any
    """The framework's name of the array's own element type."""
    origin: int | None
    """Where the array's own memory is, if it has one: other memory than this is a copy."""
    has_rows: bool
    """Whether the array has a dimension; the memory of a complex number has one."""
    gpu: Gpu | None = None
    """Where the memory is; None for host memory."""

    @property
    def is_own(self) -> bool:
        """Whether the memory is the array's."""
        return self.address == self.origin


class RowArrays(Protocol[T_co]):
    """A framework's description of its arrays, for operations whose results the core allocates."""

    def describe(self, array: Any, op: int | None) -> Memory:
        """Memory with the values of an array: its own if possible.

        TypeError for what is no array; ValueError if its elements cannot be combined with `op`, or not be sent at all.
        """

    def wrap_output(self, output: Output, dtype: Any) -> T_co:
        """The array over memory whose size was known late, of the element type of a `Memory`."""

    def rows(self, splits: Any) -> list[int] | None:
        """Alltoall's rows for each rank; None for an even split. ValueError for what is no list of counts."""

    def counts(self, numbers: list[int], splits: Any) -> T_co:
        """An array of 32-bit integers, where `splits` is."""


class Arrays(RowArrays[T], Protocol[T]):
    """A framework's description of its arrays."""

    def check_writable(self, array: T) -> None:
        """Raise ValueError if results cannot be written into it."""

    def allocate(self, like: Memory) -> Allocation:
        """Memory of the same type and shape, with any content."""

    def copy(self, memory: Memory) -> Allocation:
        """Memory of the same type and shape, with the same content."""

    def put(self, array: T, memory: Memory) -> None:
        """Have the array hold the values of the memory that `describe` gave for it, or of a copy in its place."""

    def wrap(self, owner: Any, dtype: Any) -> T:
        """The array that has this memory, of the element type of a `Memory`."""


def _entry(source: Memory, output: Allocation) -> Entry:
    address, owner = output
    return (source.address, address, source.code, source.shape, (source.owner, owner))


def _in_place(memory: Memory) -> Entry:
    address = memory.address
    return (address, address, memory.code, memory.shape, memory.owner)


def _place(memories: Sequence[Memory]) -> Gpu | None:
    """The GPU that has all these memories, None for host memory; raise if they are in several places."""
    gpu = memories[0].gpu
    for memory in memories:
        other = memory.gpu
        if other is not gpu and str(other) != str(gpu):  # of another type of tensors, or elsewhere
            raise ValueError(
                "Tensors in list must be on same device: one is on "
                f"{gpu or 'the CPU'}, another on {other or 'the CPU'}."
            )
    return gpu


def _allocators(gpu: Gpu | None, sources: Sequence[Memory]) -> list[Allocate] | None:
    return None if gpu is None else [gpu.allocator(source.owner) for source in sources]


def _rows_entry(source: Memory) -> Entry:
    # An array without rows must not seem to have rows, so that the core refuses it.
    return (source.address, 0, source.code, source.shape if source.has_rows else (), source.owner)


def _places(
    kind: int, gpu: Gpu | None, sources: Sequence[Memory], process_set: ProcessSet
) -> tuple[list[Entry], list[Output] | None, list[Allocate] | None]:
    """Where results of an operation on rows go: entries; the memory, if that is given here; else who gives it later.

    On a GPU it is given here where the size is known: of a reducescatter, unless that will be refused.
    """
    shapes = []
    if gpu is not None and kind == _core.REDUCESCATTER:
        for source in sources:
            rows = _core.scattered_rows(process_set.process_set_id, source.shape[0])
            if rows is not None:
                shapes.append((rows, *source.shape[1:]))
    if gpu is None or len(shapes) < len(sources):
        return [_rows_entry(source) for source in sources], None, _allocators(gpu, sources)
    entries, outputs = [], []
    for source, shape in zip(sources, shapes, strict=True):
        output = gpu.allocator(source.owner)(shape)
        entries.append(_entry(source, output))
        outputs.append((output[1], shape))
    return entries, outputs, None


class RowCollectives(Generic[T]):
    """Operations whose results the core allocates; a framework that runs the others in an engine of its own has these.

    Meaning, arguments and errors are those of `horovod.torch`'s of the same names. `prefix` begins every operation's
    name.
    """

    def __init__(self, arrays: RowArrays[T], prefix: str = "") -> None:
        self._row_arrays = arrays
        self._prefix = prefix

    def _operand(self, array: Any, reduction: Reduction | None) -> Memory:
        return self._row_arrays.describe(array, reduction.op if reduction else None)

    def _rows(
        self,
        kind: int,
        array: T,
        prefix: str,
        name: str | None,
        process_set: ProcessSet,
        reduction: Reduction | None = None,
    ) -> int:
        its = self._row_arrays
        source = self._operand(array, reduction)
        if kind == _core.REDUCESCATTER and not source.has_rows:
            raise ValueError(_NO_ROWS)
        dtype = source.dtype
        entries, given, allocators = _places(kind, source.gpu, (source,), process_set)
        return start(
            kind,
            self._prefix + prefix,
            name,
            entries,
            process_set.process_set_id,
            op=reduction.op if reduction else Sum,
            prescale=reduction.prescale_factor if reduction else 1.0,
            postscale=reduction.postscale_factor if reduction else 1.0,
            finish=lambda outputs: its.wrap_output((given or outputs)[0], dtype),
            gpu=source.gpu,
            allocators=allocators,
        )

    def _grouped_rows(
        self,
        kind: int,
        arrays: Sequence[T],
        prefix: str,
        name: str | None,
        process_set: ProcessSet,
        reduction: Reduction | None = None,
    ) -> int:
        arrays = tuple(arrays)
        require_members(arrays)
        its = self._row_arrays
        sources = [self._operand(array, reduction) for array in arrays]
        if kind == _core.REDUCESCATTER and not all(source.has_rows for source in sources):
            raise ValueError(_NO_ROWS)
        dtypes = [source.dtype for source in sources]
        gpu = _place(sources)
        entries, given, allocators = _places(kind, gpu, sources, process_set)

        def finish(outputs: Any) -> tuple[T, ...]:
            results = zip(given or outputs, dtypes, strict=True)
            return tuple([its.wrap_output(output, dtype) for output, dtype in results])

        return start(
            kind,
            self._prefix + prefix,
            name,
            entries,
            process_set.process_set_id,
            op=reduction.op if reduction else Sum,
            prescale=reduction.prescale_factor if reduction else 1.0,
            postscale=reduction.postscale_factor if reduction else 1.0,
            finish=finish,
            gpu=gpu,
            allocators=allocators,
        )

    def allgather_async(
        self, array: T, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> int:
        """Start an `allgather` and return its handle."""
        return self._rows(_core.ALLGATHER, array, "allgather", name, process_set)

    def grouped_allgather_async(
        self,
        arrays: Sequence[T],
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> int:
        """Start a `grouped_allgather` and return its handle."""
        prefix = "grouped_allgather"
        return self._grouped_rows(_core.ALLGATHER, arrays, prefix, name, process_set)

    def allgather(self, array: T, *args: Any, **kwargs: Any) -> T:
        """Return the arrays of all ranks one after the other along dimension 0, which may differ between ranks."""
        result: T = _core.wait(self.allgather_async(array, *args, **kwargs))
        return result

    def grouped_allgather(self, arrays: Sequence[T], *args: Any, **kwargs: Any) -> tuple[T, ...]:
        """Gather several arrays as one operation: all or none."""
        result: tuple[T, ...] = _core.wait(self.grouped_allgather_async(arrays, *args, **kwargs))
        return result

    def reducescatter_async(
        self,
        array: T,
        name: str | None = None,
        op: int | str = Average,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> int:
        """Start a `reducescatter` and return its handle."""
        reduction = Reduction(_scattering(op), prescale_factor, postscale_factor, process_set)
        kind, prefix = _core.REDUCESCATTER, "reducescatter"
        return self._rows(kind, array, prefix, name, process_set, reduction)

    def grouped_reducescatter_async(
        self,
        arrays: Sequence[T],
        name: str | None = None,
        op: int | str = Average,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> int:
        """Start a `grouped_reducescatter` and return its handle."""
        arrays = tuple(arrays)
        require_members(arrays)
        reduction = Reduction(_scattering(op), prescale_factor, postscale_factor, process_set)
        kind, prefix = _core.REDUCESCATTER, "grouped_reducescatter"
        return self._grouped_rows(kind, arrays, prefix, name, process_set, reduction)

    def reducescatter(self, array: T, *args: Any, **kwargs: Any) -> T:
        """Combine the arrays of all ranks and return this rank's part of the rows."""
        result: T = _core.wait(self.reducescatter_async(array, *args, **kwargs))
        return result

    def grouped_reducescatter(
        self, arrays: Sequence[T], *args: Any, **kwargs: Any
    ) -> tuple[T, ...]:
        """Reduce and scatter several arrays as one operation: all or none."""
        result: tuple[T, ...] = _core.wait(
            self.grouped_reducescatter_async(arrays, *args, **kwargs)
        )
        return result

    def alltoall_async(
        self,
        array: T,
        splits: Any = None,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> int:
        """Start an `alltoall` and return its handle; `synchronize` gives `(output, received_splits)` in any case."""
        its = self._row_arrays
        source = its.describe(array, None)
        dtype = source.dtype

        def finish(result: Any) -> tuple[T, T]:
            outputs, received = result
            return its.wrap_output(outputs[0], dtype), its.counts(received, splits)

        return start(
            _core.ALLTOALL,
            f"{self._prefix}alltoall",
            name,
            (_rows_entry(source),),
            process_set.process_set_id,
            splits=its.rows(splits),
            finish=finish,
            gpu=source.gpu,
            allocators=_allocators(source.gpu, (source,)),
        )

    def alltoall(
        self,
        array: T,
        splits: Any = None,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> T | tuple[T, T]:
        """Send rows to every rank and return those received; with `splits` also how many came from each."""
        received: tuple[T, T] = _core.wait(self.alltoall_async(array, splits, name, process_set))
        return received[0] if splits is None else received


class Collectives(RowCollectives[T]):
    """All operations."""

    def __init__(self, arrays: Arrays[T]) -> None:
        super().__init__(arrays)
        self._arrays = arrays

    # ---- allreduce ---------------------------------------------------------------------------------------------

    # The maker of results is kept until they are requested: it must not keep operands alive. A single array has a path
    # of its own, because lists of one are a large part of a small operation.

    def _new(self, source: Memory) -> Allocation:
        """Memory for a result: the operand's where that had to be copied anyway."""
        return self._arrays.allocate(source) if source.is_own else (source.address, source.owner)

    def _start_reduction(
        self,
        name: str | None,
        entries: Sequence[Entry],
        grouped: bool,
        reduction: Reduction,
        finish: Callable[[Any], Any],
        gpu: Gpu | None,
    ) -> int:
        return start(
            _core.ALLREDUCE,
            "grouped_allreduce" if grouped else "allreduce",
            name,
            entries,
            reduction.process_set.process_set_id,
            op=reduction.op,
            prescale=reduction.prescale_factor,
            postscale=reduction.postscale_factor,
            finish=finish,
            gpu=gpu,
        )

    def _reduce_in_place(
        self,
        arrays: Sequence[T],
        grouped: bool,
        name: str | None,
        reduction: Reduction,
    ) -> int:
        require_members(arrays)
        its = self._arrays
        for array in arrays:
            its.check_writable(array)
        operands = [its.describe(array, reduction.op) for array in arrays]
        gpu = operands[0].gpu
        if len(operands) > 1:
            gpu = _place(operands)
            for i in later_sharers([(m.address, m.address + m.nbytes) for m in operands]):
                address, owner = its.copy(operands[i])
                operands[i] = replace(operands[i], address=address, owner=owner)

        def finish(_: Any) -> Any:
            for array, memory in zip(arrays, operands, strict=True):
                its.put(array, memory)
            return arrays if grouped else arrays[0]

        entries = [_in_place(memory) for memory in operands]
        return self._start_reduction(name, entries, grouped, reduction, finish, gpu)

    def allreduce_async(
        self,
        array: T,
        average: bool | None = None,
        name: str | None = None,
        op: int | str | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> int:
        """Start an `allreduce` and return its handle. The input must not be changed before `synchronize`."""
        reduction = Reduction(
            resolve_op(op, average), prescale_factor, postscale_factor, process_set
        )
        its = self._arrays
        source = self._operand(array, reduction)
        output = self._new(source)
        owner, dtype = output[1], source.dtype
        entries = (_entry(source, output),)
        return self._start_reduction(
            name, entries, False, reduction, lambda _: its.wrap(owner, dtype), source.gpu
        )

    def allreduce_async_(
        self,
        array: T,
        average: bool | None = None,
        name: str | None = None,
        op: int | str | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> int:
        """Start an `allreduce_` and return its handle. The array must not be touched before `synchronize`."""
        reduction = Reduction(
            resolve_op(op, average), prescale_factor, postscale_factor, process_set
        )
        return self._reduce_in_place((array,), False, name, reduction)

    def grouped_allreduce_async(
        self,
        arrays: Sequence[T],
        average: bool | None = None,
        name: str | None = None,
        op: int | str | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> int:
        """Start a `grouped_allreduce` and return its handle."""
        reduction = Reduction(
            resolve_op(op, average), prescale_factor, postscale_factor, process_set
        )
        arrays = tuple(arrays)
        require_members(arrays)
        its = self._arrays
        sources = [self._operand(array, reduction) for array in arrays]
        gpu = _place(sources)
        entries, results = [], []
        for source in sources:
            output = self._new(source)
            entries.append(_entry(source, output))
            results.append((output[1], source.dtype))

        def finish(_: Any) -> tuple[T, ...]:
            return tuple([its.wrap(owner, dtype) for owner, dtype in results])

        return self._start_reduction(name, entries, True, reduction, finish, gpu)

    def grouped_allreduce_async_(
        self,
        arrays: Sequence[T],
        average: bool | None = None,
        name: str | None = None,
        op: int | str | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> int:
        """Start a `grouped_allreduce_` and return its handle."""
        reduction = Reduction(
            resolve_op(op, average), prescale_factor, postscale_factor, process_set
        )
        return self._reduce_in_place(tuple(arrays), True, name, reduction)

    def allreduce(self, array: T, *args: Any, **kwargs: Any) -> T:
        """Combine one array of every rank into a new one; arguments as in `allreduce_async`."""
        result: T = _core.wait(self.allreduce_async(array, *args, **kwargs))
        return result

    def allreduce_(self, array: T, *args: Any, **kwargs: Any) -> T:
        """Combine one array of every rank in place, and return it; arguments as in `allreduce_async_`."""
        result: T = _core.wait(self.allreduce_async_(array, *args, **kwargs))
        return result

    def grouped_allreduce(self, arrays: Sequence[T], *args: Any, **kwargs: Any) -> tuple[T, ...]:
        """Combine several arrays as one operation: all or none."""
        result: tuple[T, ...] = _core.wait(self.grouped_allreduce_async(arrays, *args, **kwargs))
        return result

    def grouped_allreduce_(self, arrays: Sequence[T], *args: Any, **kwargs: Any) -> tuple[T, ...]:
        """Combine several arrays in place as one operation: all or none."""
        result: tuple[T, ...] = _core.wait(self.grouped_allreduce_async_(arrays, *args, **kwargs))
        return result

    # ---- broadcast ---------------------------------------------------------------------------------------------

    def broadcast_async(
        self,
        array: T,
        root_rank: int,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> int:
        """Start a `broadcast` and return its handle."""
        its = self._arrays
        source = its.describe(array, None)
        if not source.is_own:
            output: Allocation = (source.address, source.owner)
        elif _is_root(root_rank):
            output = its.copy(source)  # nobody writes into the root's output
        else:
            output = its.allocate(source)
        (address, owner), dtype = output, source.dtype
        return start(
            _core.BROADCAST,
            "broadcast",
            name,
            ((address, address, source.code, source.shape, owner),),
            process_set.process_set_id,
            root_rank=root_rank,
            finish=lambda _: its.wrap(owner, dtype),
            gpu=source.gpu,
        )

    def broadcast_async_(
        self,
        array: T,
        root_rank: int,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> int:
        """Start a `broadcast_` and return its handle."""
        its = self._arrays
        its.check_writable(array)
        memory = its.describe(array, None)
        is_root = _is_root(root_rank)

        def finish(_: Any) -> T:
            if not is_root:
                its.put(array, memory)
            return array

        return start(
            _core.BROADCAST,
            "broadcast",
            name,
            (_in_place(memory),),
            process_set.process_set_id,
            root_rank=root_rank,
            finish=finish,
            gpu=memory.gpu,
        )

    def broadcast(self, array: T, root_rank: int, *args: Any, **kwargs: Any) -> T:
        """Return the array of the root, a global rank, as a new one on every rank."""
        result: T = _core.wait(self.broadcast_async(array, root_rank, *args, **kwargs))
        return result

    def broadcast_(self, array: T, root_rank: int, *args: Any, **kwargs: Any) -> T:
        """Replace the values of an array by the root's, and return it."""
        result: T = _core.wait(self.broadcast_async_(array, root_rank, *args, **kwargs))
        return result


def _scattering(op: int | str) -> int:
    """The operator of a reducescatter; raise if it cannot be that."""
    op = resolve_op(op, None)
    if op not in (Average, Sum):
        raise HorovodInternalError("Reducescatter currently only supports AVERAGE and SUM.")
    return op


def _is_root(root_rank: int) -> bool:
    # Before `init` it is the start that has to fail, with its own error.
    return _core.is_initialized() and _core.rank() == root_rank


def require_members(arrays: Sequence[Any]) -> None:
    """Raise unless a group has a tensor."""
    if not arrays:
        raise ValueError("A grouped operation needs at least one tensor.")
