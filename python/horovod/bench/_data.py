"""Memory filled with data of which every collective's result is known, exactly, on any number of ranks."""

import ctypes
import mmap
import random
import struct
import sys
from collections.abc import Iterator

from horovod.bench._options import DType

# Data repeat after a prime number of elements, so that no chunk of any size looks like its neighbour.
_PERIOD = 1021
_PERIODS_OF_MANY_RANKS = (65521, 524287, 8388593)
_TOP = 7  # results are 0 to 7, or 0 and 1 for bool

_FORMATS = {
    "uint8": "B",
    "int8": "b",
    "uint16": "H",
    "int16": "h",
    "int32": "i",
    "int64": "q",
    "float16": "e",
    "float32": "f",
    "float64": "d",
    "bool": "?",
    "uint32": "I",
    "uint64": "Q",
}


class Memory:
    """Page-aligned private memory, with the address that the core wants."""

    def __init__(self, nbytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._map = mmap.mmap(-1, nbytes, flags=flags)
        self._pin = ctypes.c_char.from_buffer(self._map)
        self.view = memoryview(self._map)
        self.address = ctypes.addressof(self._pin)

    def content(self) -> memoryview:
        """The bytes of the buffer."""
        return self.view

    def fill(self, offset: int, length: int, period: bytes) -> None:
        """Repeat a period over part of the memory."""
        for start, piece in _pieces(offset, length, period):
            self.view[start : start + len(piece)] = piece


def holds(view: memoryview, offset: int, length: int, period: bytes) -> bool:
    """Whether a part of the memory is nothing but repetitions of a period."""
    pieces = _pieces(offset, length, period)
    return all(view[start : start + len(piece)] == piece for start, piece in pieces)


def _pieces(offset: int, length: int, period: bytes) -> Iterator[tuple[int, bytes]]:
    """Repetitions of a period that cover a range, each with its place."""
    block = period * max(1, (1 << 20) // len(period))
    for start in range(0, length, len(block)):
        yield offset + start, block[: length - start]


def moved(seed: int, dtype: DType) -> bytes:
    """Bytes from one sender to one receiver where nothing is computed: any bytes, which differ for each seed."""
    data = random.Random(seed).randbytes(_PERIOD)
    return bytes(byte & 1 for byte in data) if dtype.name == "bool" else data


class Reduction:
    """Contributions to a reduction, and its result.

    Element i is decided by one rank alone, `i % period % ranks`: that one contributes the value that shows in the
    result, all others what leaves it alone. So the result is exact in every type, and a rank that is missing or
    counted twice shows. `beside` is how many ranks of this one's host are averaged before the hosts are combined, for
    Adasum of tensors on GPUs.
    """

    def __init__(self, operator: str, dtype: DType, ranks: int, beside: int | None = None) -> None:
        self.dtype = dtype
        self.ranks = ranks
        # Long enough for every rank to decide on each value.
        periods = (_PERIOD, *_PERIODS_OF_MANY_RANKS)
        self.period = next(period for period in periods if period >= ranks * (_TOP + 1))
        scale = ranks if operator == "average" else beside or 1
        # The same on all ranks, whose hosts may have different numbers of them.
        self._top = min(_TOP, dtype.exact // (scale if beside is None else ranks))
        # Value that shows in the result, contributed by the deciding rank; and the value that all others contribute.
        self._scale = scale
        self._other = {"min": self._top, "product": 1}.get(operator, 0)

    @property
    def is_exact(self) -> bool:
        """Whether the type can hold what the ranks would contribute."""
        return self._top >= 1

    def contribution(self, rank: int) -> bytes:
        """One period of what a member contributes, counted from 0 in its process set."""
        return self._encoded(
            [
                self._result(i) * self._scale if i % self.ranks == rank else self._other
                for i in range(self.period)
            ]
        )

    def agrees(self, view: memoryview, first: int) -> bool:
        """Whether a result holds the elements from `first` on."""
        size = self.dtype.nbytes
        turned = [self._result((first + i) % self.period) for i in range(self.period)]
        head = bytes(view[: self.period * size])
        # Multiplying by 1 / ranks may round the last bit; all else is exact, and equal elements are equal bits.
        near = self._near(head, turned[: len(head) // size])
        return near and holds(view, 0, len(view), head)

    def _result(self, index: int) -> int:
        # The same rank decides on different values, whatever the number of ranks.
        return index // self.ranks % (self._top + 1)

    def _near(self, data: bytes, wanted: list[int]) -> bool:
        # `exact` is 2 to the power of the bits of a floating type's precision.
        slack = 2 / self.dtype.exact if self.dtype.is_floating else 0.0
        pairs = zip(self._decoded(data), wanted, strict=True)
        return all(abs(got - want) <= slack * abs(want) for got, want in pairs)

    def _encoded(self, values: list[int]) -> bytes:
        if self.dtype.name == "bfloat16":  # the upper half of a float32
            words = memoryview(struct.pack(f"={len(values)}f", *values)).cast("H")
            return words[1::2].tobytes() if sys.byteorder == "little" else words[::2].tobytes()
        return struct.pack(f"={len(values)}{_FORMATS[self.dtype.name]}", *values)

    def _decoded(self, data: bytes) -> tuple[float, ...]:
        count = len(data) // self.dtype.nbytes
        if self.dtype.name == "bfloat16":
            words = struct.unpack(f"={count}H", data)
            return struct.unpack(f"={count}f", struct.pack(f"={count}I", *(w << 16 for w in words)))
        return struct.unpack(f"={count}{_FORMATS[self.dtype.name]}", data)
