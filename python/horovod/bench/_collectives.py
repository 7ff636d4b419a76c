"""Each collective as something to prepare, run, and check, through `horovod._core` alone."""

import time
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from horovod import _core
from horovod.bench._data import Memory, Reduction, holds, moved
from horovod.bench._gpu import Device, GpuMemory
from horovod.bench._options import IN_PLACE, OPERATORS, REDUCING, DType, Options, possible
from horovod.common import _ops
from horovod.common._operations import start

_OP_CODES = dict(
    zip(
        OPERATORS,
        (_ops.Sum, _ops.Average, _ops.Min, _ops.Max, _ops.Product, _ops.Adasum),
        strict=True,
    )
)
_KINDS = {
    "allreduce": _core.ALLREDUCE,
    "allgather": _core.ALLGATHER,
    "broadcast": _core.BROADCAST,
    "alltoall": _core.ALLTOALL,
    "reducescatter": _core.REDUCESCATTER,
}


# On a GPU so many calls are under way at a time, as those of a training step are; the GPU carries them out in order.
_IN_FLIGHT_MAX = 10


@dataclass(frozen=True)
class Members:
    """The participating ranks."""

    process_set: int
    ranks: tuple[int, ...]
    place: int  # this rank's, among them
    hosts: tuple[str, ...]  # of each

    @property
    def count(self) -> int:
        """How many."""
        return len(self.ranks)

    @property
    def beside(self) -> int:
        """How many are on this rank's host, itself among them."""
        return self.hosts.count(self.hosts[self.place])


@dataclass(frozen=True)
class Case:
    """One line of the report: a collective with one size, type and operator."""

    collective: str
    dtype: DType | None
    operator: str | None
    in_place: bool | None
    elements: int  # of the whole buffer, as nccl-tests counts

    @property
    def nbytes(self) -> int:
        """Size of the whole buffer."""
        return self.elements * self.dtype.nbytes if self.dtype else 0

    def bus_factor(self, ranks: int) -> float:
        """Bus bandwidth over algorithm bandwidth, as nccl-tests defines it."""
        if self.collective == "allreduce":
            return 2 * (ranks - 1) / ranks
        return 1.0 if self.collective == "broadcast" else (ranks - 1) / ranks


def cases(options: Options, members: Members) -> list[Case]:
    """All that the command line asks for, in the order of the report."""
    found = []
    for collective in options.collectives:
        if collective == "barrier":
            found.append(Case(collective, None, None, None, 0))
            continue
        # The number of members must divide buffers in which each member owns a share.
        parts = 1 if collective in IN_PLACE else members.count
        operators: Sequence[str | None] = options.operators if collective in REDUCING else (None,)
        places: Sequence[bool | None] = options.in_place if collective in IN_PLACE else (None,)
        for dtype in options.dtypes:
            for operator in operators:
                if operator is not None and not possible(collective, dtype, operator):
                    continue
                counts = {max(1, size // dtype.nbytes // parts) * parts for size in options.sizes()}
                found += [
                    Case(collective, dtype, operator, place, count)
                    for place in places
                    for count in sorted(counts)
                ]
    return found


class Operation:
    """A case made ready on this rank."""

    def __init__(
        self, case: Case, members: Members, root: int, device: Device | None = None
    ) -> None:
        self._case, self._members, self._root, self._device = case, members, root, device
        self._set = members.process_set
        self._output: Memory | None = None
        self._results: Any = None
        if case.dtype is None:
            return
        collective = case.collective
        # An allgather's size counts what is received, from each member its share.
        self._own = case.nbytes // (members.count if collective == "allgather" else 1)
        make = device.memory if device else Memory
        self._input = make(self._own)
        output = self._input if case.in_place else None
        if case.in_place is False:
            output = self._output = make(self._own)
        self._gpu = None if device is None else device.place(case.dtype.nbytes)
        self._entry = (
            self._input.address,
            output.address if output else 0,
            case.dtype.code,
            (self._own // case.dtype.nbytes,),
            (self._input, output),
        )
        self._kind = _KINDS[collective]
        self._op = _OP_CODES[case.operator or "sum"]
        self._name = f"horovod.bench.{case.dtype.name}.{case.operator}.{case.elements}"
        self._sender = root if collective == "broadcast" else -1
        # Adasum of GPU tensors averages on each host where NCCL is found.
        averages_hosts = device is not None and _core.nccl_version() > 0
        beside = members.beside if case.operator == "adasum" and averages_hosts else None
        self._reduction = (
            Reduction(case.operator, case.dtype, members.count, beside) if case.operator else None
        )

    def run(self) -> None:
        """Once, to its end."""
        if self._case.dtype is None:
            _core.barrier(self._set)
            return
        self._results = _core.wait(self._start(0))

    def _start(self, number: int) -> int:
        return start(
            self._kind,
            "bench",
            f"{self._case.collective}.{self._name}.{number}",
            (self._entry,),
            self._set,
            op=self._op,
            root_rank=self._sender,
            gpu=self._gpu,
            allocators=None if self._gpu is None else [self._gpu.allocator(self._input)],
        )

    def timed(self, iterations: int) -> list[float]:
        """Seconds of each of so many calls by the host's clock; on a GPU of all together by its own, and their mean.

        There several are under way at a time and may be carried out as one: the time of each has no meaning.
        """
        if self._device is None or self._case.dtype is None:
            seconds = []
            for _ in range(iterations):
                begin = time.perf_counter()
                self.run()
                seconds.append(time.perf_counter() - begin)
            return seconds
        begins = self._device.mark()
        pending: deque[int] = deque()
        for number in range(iterations):
            if len(pending) == _IN_FLIGHT_MAX:
                self._results = _core.wait(pending.popleft())
            pending.append(self._start(number % _IN_FLIGHT_MAX))
        while pending:
            self._results = _core.wait(pending.popleft())
        return [self._device.seconds_between(begins, self._device.mark()) / iterations]

    def fill(self) -> None:
        """Data of which the result is known."""
        collective, place = self._case.collective, self._members.place
        if self._case.dtype is None:
            return
        if self._output:
            self._output.fill(0, self._own, b"\xff")
        if self._reduction:
            if self._reduction.is_exact:
                self._input.fill(0, self._own, self._reduction.contribution(place))
        elif collective == "alltoall":
            share = self._own // self._members.count
            for receiver in range(self._members.count):
                seed = place * self._members.count + receiver
                self._input.fill(receiver * share, share, moved(seed, self._case.dtype))
        else:
            self._input.fill(0, self._own, moved(place, self._case.dtype))

    def clear(self) -> None:
        """Zeros, which stay zeros however often they are reduced."""
        if self._case.dtype is not None:
            self._input.fill(0, self._own, b"\0")

    def correct(self) -> bool | None:
        """Whether the result of `fill` and `run` is right on this rank; None where that cannot be known."""
        case, count, place = self._case, self._members.count, self._members.place
        if case.dtype is None or (self._reduction and not self._reduction.is_exact):
            return None
        view = self._result()
        if self._reduction:
            if case.collective == "allreduce":
                return len(view) == self._own and self._reduction.agrees(view, 0)
            share = case.elements // count
            right_size = len(view) == share * case.dtype.nbytes
            return right_size and self._reduction.agrees(view, share * place)
        if case.collective == "broadcast":
            return holds(
                view, 0, self._own, moved(self._members.ranks.index(self._root), case.dtype)
            )
        if len(view) != case.nbytes:
            return False
        share = case.nbytes // count
        scattered = case.collective == "alltoall"
        seeds = (s * count + place if scattered else s for s in range(count))
        return all(
            holds(view, i * share, share, moved(seed, case.dtype)) for i, seed in enumerate(seeds)
        )

    def _result(self) -> memoryview:
        """Bytes of the result, in our memory or in what the core allocated."""
        if self._case.in_place is not None:
            return (self._output or self._input).content()
        # For an alltoall a pair: outputs and received splits.
        outputs = self._results[0] if isinstance(self._results, tuple) else self._results
        memory = outputs[0][0]
        return memory.content() if isinstance(memory, GpuMemory) else memoryview(memory).cast("B")


def exchange(values: Sequence[float], members: Members) -> list[tuple[float, ...]]:
    """The values of every member."""
    width = len(values)
    memory = Memory(8 * width)
    memory.view[:] = array("d", values).tobytes()
    entry = (memory.address, 0, 8, (width,), memory)
    name = f"horovod.bench.exchange.{width}"
    outputs: Any = _core.wait(start(_core.ALLGATHER, "bench", name, (entry,), members.process_set))
    everything = memoryview(outputs[0][0]).cast("B").cast("d").tolist()
    return [tuple(everything[i : i + width]) for i in range(0, len(everything), width)]
