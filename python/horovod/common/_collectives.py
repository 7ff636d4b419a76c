"""Every collective operation on the arrays of any framework, in terms of the few things that the framework tells.

An adapter hands an `Arrays` to `Collectives` and publishes its methods; one with automatic differentiation builds on
those that give handles. (PyTorch's passes a tensor that needs no preparation to the core in fewer steps, by itself.)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from horovod import _core
from horovod.common import _job_events
from horovod.common._operations import Entry, Output, later_sharers, start
from horovod.common._ops import Average, Sum, resolve_op
from horovod.common.exceptions import HorovodInternalError
from horovod.common.process_sets import ProcessSet, global_process_set

T = TypeVar("T")


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

    @property
    def is_own(self) -> bool:
        """Whether the memory is the array's."""
        return self.address == self.origin


class Arrays(Protocol[T]):
    """What a framework tells of its arrays."""

    def describe(self, array: Any, op: int | None) -> Memory:
        """Memory with the values of an array: its own if possible.

        TypeError for what is no array; ValueError if its elements cannot be combined with `op`, or not be sent at all.
        """

    def check_writable(self, array: T) -> None:
        """Raise ValueError if results cannot be written into it."""

    def allocate(self, like: Memory) -> Memory:
        """Memory of the same type and shape, with any content."""

    def copy(self, memory: Memory) -> Memory:
        """Other memory with the same content, for the same array: only `address` and `owner` differ."""

    def put(self, array: T, memory: Memory) -> None:
        """Have the array hold the values of the memory that `describe` gave for it, or of a `copy` of that."""

    def wrap(self, memory: Memory) -> T:
        """The array that has this memory."""

    def wrap_output(self, output: Output, dtype: Any) -> T:
        """The array over memory that the core allocated, of the element type of a `Memory`."""

    def rows(self, splits: Any) -> list[int] | None:
        """Alltoall's rows for each rank; None for an even split. ValueError for what is no list of counts."""

    def counts(self, numbers: list[int], splits: Any) -> T:
        """An array of 32-bit integers, where `splits` is."""


def _entry(source: Memory, output: Memory) -> Entry:
    return (source.address, output.address, source.code, source.shape, (source, output))


def _rows_entry(source: Memory) -> Entry:
    # What has no rows must not look as if it had, so that the core refuses it.
    return (source.address, 0, source.code, source.shape if source.has_rows else (), source)


class Collectives(Generic[T]):
    """The operations. Their meaning, arguments and errors are those of `horovod.torch`'s of the same names."""

    def __init__(self, arrays: Arrays[T]) -> None:
        self._arrays = arrays

    # ---- allreduce ---------------------------------------------------------------------------------------------

    def _reduce(
        self,
        arrays: Sequence[T],
        in_place: bool,
        grouped: bool,
        average: bool | None,
        name: str | None,
        op: int | str | None,
        scales: tuple[float, float],
        process_set: ProcessSet,
    ) -> int:
        op = resolve_op(op, average)
        require_members(arrays)
        its = self._arrays
        if in_place:
            for array in arrays:
                its.check_writable(array)
        sources = [its.describe(array, op) for array in arrays]
        if in_place:
            outputs = sources = self._apart(sources)
            finish = self._putting(arrays, outputs, grouped)
        else:
            outputs = [its.allocate(m) if m.is_own else m for m in sources]
            finish = self._wrapping(outputs, grouped)
        return start(
            _core.ALLREDUCE,
            "grouped_allreduce" if grouped else "allreduce",
            name,
            [_entry(*pair) for pair in zip(sources, outputs, strict=True)],
            process_set.process_set_id,
            op=op,
            prescale=scales[0],
            postscale=scales[1],
            grouped=grouped,
            finish=finish,
        )

    def _apart(self, operands: list[Memory]) -> list[Memory]:
        """What to work on in place: copies of those that share memory with others."""
        if len(operands) > 1:
            for i in later_sharers([(m.address, m.address + m.nbytes) for m in operands]):
                operands[i] = self._arrays.copy(operands[i])
        return operands

    # What makes the results is kept until they are asked for: it must not keep the operands alive.

    def _putting(
        self, arrays: Sequence[T], outputs: list[Memory], grouped: bool
    ) -> Callable[[Any], Any]:
        put = self._arrays.put

        def finish(_: Any) -> Any:
            for array, memory in zip(arrays, outputs, strict=True):
                put(array, memory)
            return arrays if grouped else arrays[0]

        return finish

    def _wrapping(self, outputs: list[Memory], grouped: bool) -> Callable[[Any], Any]:
        wrap = self._arrays.wrap
        if grouped:
            return lambda _: tuple([wrap(memory) for memory in outputs])
        [output] = outputs
        return lambda _: wrap(output)

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
        scales = (prescale_factor, postscale_factor)
        return self._reduce((array,), False, False, average, name, op, scales, process_set)

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
        scales = (prescale_factor, postscale_factor)
        return self._reduce((array,), True, False, average, name, op, scales, process_set)

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
        scales = (prescale_factor, postscale_factor)
        return self._reduce(tuple(arrays), False, True, average, name, op, scales, process_set)

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
        scales = (prescale_factor, postscale_factor)
        return self._reduce(tuple(arrays), True, True, average, name, op, scales, process_set)

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

    # ---- what gives rows ---------------------------------------------------------------------------------------

    def _rows(
        self,
        kind: int,
        arrays: Sequence[T],
        grouped: bool,
        prefix: str,
        name: str | None,
        process_set: ProcessSet,
        op: int | None = None,
        scales: tuple[float, float] = (1.0, 1.0),
    ) -> int:
        require_members(arrays)
        its = self._arrays
        sources = [its.describe(array, op) for array in arrays]
        if kind == _core.REDUCESCATTER and not all(source.has_rows for source in sources):
            raise ValueError("Reducescatter does not support scalar inputs.")
        dtypes = [source.dtype for source in sources]

        def finish(outputs: Any) -> Any:
            results = [its.wrap_output(*pair) for pair in zip(outputs, dtypes, strict=True)]
            return tuple(results) if grouped else results[0]

        return start(
            kind,
            f"grouped_{prefix}" if grouped else prefix,
            name,
            [_rows_entry(source) for source in sources],
            process_set.process_set_id,
            op=Sum if op is None else op,
            prescale=scales[0],
            postscale=scales[1],
            grouped=grouped,
            finish=finish,
        )

    def allgather_async(
        self, array: T, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> int:
        """Start an `allgather` and return its handle."""
        return self._rows(_core.ALLGATHER, (array,), False, "allgather", name, process_set)

    def grouped_allgather_async(
        self,
        arrays: Sequence[T],
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> int:
        """Start a `grouped_allgather` and return its handle."""
        return self._rows(_core.ALLGATHER, tuple(arrays), True, "allgather", name, process_set)

    def allgather(self, array: T, *args: Any, **kwargs: Any) -> T:
        """Return the arrays of all ranks one after the other along dimension 0, which may differ between ranks."""
        result: T = _core.wait(self.allgather_async(array, *args, **kwargs))
        return result

    def grouped_allgather(self, arrays: Sequence[T], *args: Any, **kwargs: Any) -> tuple[T, ...]:
        """Gather several arrays as one operation: all or none."""
        result: tuple[T, ...] = _core.wait(self.grouped_allgather_async(arrays, *args, **kwargs))
        return result

    def _scatter(
        self,
        arrays: Sequence[T],
        grouped: bool,
        name: str | None,
        op: int | str,
        process_set: ProcessSet,
        scales: tuple[float, float],
    ) -> int:
        op = resolve_op(op, None)
        if op not in (Average, Sum):
            raise HorovodInternalError("Reducescatter currently only supports AVERAGE and SUM.")
        kind = _core.REDUCESCATTER
        return self._rows(kind, arrays, grouped, "reducescatter", name, process_set, op, scales)

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
        scales = (prescale_factor, postscale_factor)
        return self._scatter((array,), False, name, op, process_set, scales)

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
        scales = (prescale_factor, postscale_factor)
        return self._scatter(tuple(arrays), True, name, op, process_set, scales)

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

    # ---- broadcast and alltoall --------------------------------------------------------------------------------

    def _broadcast(
        self, array: T, root_rank: int, name: str | None, process_set: ProcessSet, in_place: bool
    ) -> int:
        its = self._arrays
        if in_place:
            its.check_writable(array)
        memory = its.describe(array, None)
        # Before `init` it is the start that has to fail, with its own error.
        is_root = _core.is_initialized() and _core.rank() == root_rank
        if not in_place and memory.is_own:
            # Nobody writes into the root's output.
            memory = its.copy(memory) if is_root else its.allocate(memory)

        def put(_: Any) -> T:
            if not is_root:
                its.put(array, memory)
            return array

        finish = put if in_place else self._wrapping([memory], False)
        entries = [_entry(memory, memory)]
        set_id = process_set.process_set_id
        kind = _core.BROADCAST
        return start(kind, "broadcast", name, entries, set_id, root_rank=root_rank, finish=finish)

    def broadcast_async(
        self,
        array: T,
        root_rank: int,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> int:
        """Start a `broadcast` and return its handle."""
        return self._broadcast(array, root_rank, name, process_set, False)

    def broadcast_async_(
        self,
        array: T,
        root_rank: int,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> int:
        """Start a `broadcast_` and return its handle."""
        return self._broadcast(array, root_rank, name, process_set, True)

    def broadcast(self, array: T, root_rank: int, *args: Any, **kwargs: Any) -> T:
        """Return the array of the root, a global rank, as a new one on every rank."""
        result: T = _core.wait(self.broadcast_async(array, root_rank, *args, **kwargs))
        return result

    def broadcast_(self, array: T, root_rank: int, *args: Any, **kwargs: Any) -> T:
        """Replace the values of an array by the root's, and return it."""
        result: T = _core.wait(self.broadcast_async_(array, root_rank, *args, **kwargs))
        return result

    def alltoall_async(
        self,
        array: T,
        splits: Any = None,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> int:
        """Start an `alltoall` and return its handle; `synchronize` gives `(output, received_splits)` in any case."""
        its = self._arrays
        source = its.describe(array, None)
        dtype = source.dtype

        def finish(result: Any) -> tuple[T, T]:
            outputs, received = result
            return its.wrap_output(outputs[0], dtype), its.counts(received, splits)

        return start(
            _core.ALLTOALL,
            "alltoall",
            name,
            [_rows_entry(source)],
            process_set.process_set_id,
            splits=its.rows(splits),
            finish=finish,
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


def require_members(arrays: Sequence[Any]) -> None:
    """Raise unless a group has a tensor."""
    if not arrays:
        raise ValueError("A grouped operation needs at least one tensor.")


def checked_splits(rows: list[int]) -> list[int] | None:
    """Alltoall's rows for each rank, None where there are none; raise unless they can be that."""
    if any(n < 0 for n in rows):
        raise ValueError(f"alltoall expects splits that are not negative, not {rows}.")
    return rows or None


def synchronize(handle: int) -> Any:
    """Wait for an asynchronous operation and return its result; None if the handle has given it already.

    Raises
    ------
    TypeError
        Not a handle.
    HorovodNotInitializedError
        `hvd.shutdown()` was called before: the result is lost.
    HorovodInternalError
        The operation failed on all its ranks: they disagree about it, a rank was lost, or Horovod was shut down.
    """
    return _core.wait(handle)


def poll(handle: int) -> bool:
    """Whether an asynchronous operation is done, so that `synchronize` would not wait.

    Raises
    ------
    ValueError
        Unknown handle, or one that was synchronized already.
    """
    return _core.poll(handle)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every member of the process set has called this.

    Raises
    ------
    ValueError
        Not a member.
    HorovodInternalError
        A rank was lost, or Horovod is not initialised.
    """
    _core.barrier(process_set.process_set_id)


def join(device: int = -1) -> int:
    """Say that this rank has no more data, and wait until every rank said so.

    Meanwhile allreduces of the other ranks go on without this one: it contributes the identity of their
    operator, and `Average` divides by the number of all ranks (`HOROVOD_JOIN_AVERAGE=contributors`: of those
    that are left). Operations that need its data, such as allgather, fail on the ranks that call them. Afterwards all
    ranks may go on, such as with the next epoch.

    Parameters
    ----------
    device
        Accepted for scripts written for GPUs; nothing is allocated here.

    Returns
    -------
    int
        The global rank that joined last, the same on every rank.

    Raises
    ------
    HorovodInternalError
        A rank was lost, or Horovod is not initialised.
    """
    del device
    last = _core.join()
    _job_events.note_join()
    return last
