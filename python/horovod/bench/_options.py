"""The command line: what to measure, with which sizes, types and operators."""

import argparse
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

COLLECTIVES: Final = (
    "allreduce",
    "allgather",
    "broadcast",
    "alltoall",
    "reducescatter",
    "barrier",
)
OPERATORS: Final = ("sum", "average", "min", "max", "product", "adasum")
REDUCING: Final = ("allreduce", "reducescatter")
IN_PLACE: Final = ("allreduce", "broadcast")


@dataclass(frozen=True)
class DType:
    """An element type: its code in `horovod._core`, its size, and up to where whole numbers are exact."""

    name: str
    code: int
    nbytes: int
    exact: int

    @property
    def is_floating(self) -> bool:
        """Whether it has a fraction."""
        return "float" in self.name


DTYPES: Final = {
    dtype.name: dtype
    for dtype in (
        DType("uint8", 0, 1, 255),
        DType("int8", 1, 1, 127),
        DType("uint16", 2, 2, 2**16 - 1),
        DType("int16", 3, 2, 2**15 - 1),
        DType("int32", 4, 4, 2**31 - 1),
        DType("int64", 5, 8, 2**63 - 1),
        DType("float16", 6, 2, 2**11),
        DType("float32", 7, 4, 2**24),
        DType("float64", 8, 8, 2**53),
        DType("bool", 9, 1, 1),
        DType("bfloat16", 10, 2, 2**8),
        DType("uint32", 11, 4, 2**32 - 1),
        DType("uint64", 12, 8, 2**64 - 1),
    )
}

_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class UsageError(Exception):
    """The command line cannot be understood; the text says why."""


@dataclass(frozen=True)
class Options:
    """A valid command line."""

    collectives: tuple[str, ...]
    begin: int
    end: int
    factor: float
    dtypes: tuple[DType, ...]
    operators: tuple[str, ...]
    in_place: tuple[bool, ...]
    iterations: int
    warm_up: int
    check: bool
    root: int | None
    process_set: tuple[int, ...] | None
    json: str | None
    device: str

    def sizes(self) -> Iterator[int]:
        """Bytes from begin to end, each `factor` times the one before; the end itself only if that meets it."""
        size = float(self.begin)
        while round(size) <= self.end:
            yield round(size)
            size *= self.factor


def parse(words: Sequence[str]) -> Options:
    """Read the command line.

    Raises
    ------
    UsageError
        Something in it is not possible.
    """
    found = _parser().parse_args(words)
    in_place = {"in": (True,), "out": (False,), "both": (True, False)}[found.place]
    options = Options(
        tuple(found.collectives) or COLLECTIVES,
        found.begin,
        found.end,
        found.factor,
        tuple(DTYPES[name] for name in found.dtype),
        tuple(found.op),
        in_place,
        found.iterations,
        found.warm_up,
        found.check == 1,
        found.root,
        found.process_set,
        found.json,
        found.device,
    )
    for name in options.collectives:
        if name not in COLLECTIVES:
            raise UsageError(f"unknown collective {name!r}; known: {', '.join(COLLECTIVES)}")
    if options.begin > options.end:
        raise UsageError(f"--begin {options.begin} is more than --end {options.end} (bytes)")
    if not options.factor > 1:
        raise UsageError(f"--factor must be more than 1, not {options.factor:g}")
    if options.iterations < 1 or options.warm_up < 0:
        raise UsageError("at least one iteration is needed, and no negative number of warm-ups")
    return options


def possible(collective: str, dtype: DType, operator: str) -> bool:
    """Whether a collective has the operator for the type."""
    if collective == "reducescatter" and operator not in ("sum", "average"):
        return False
    if operator == "adasum":
        return dtype.is_floating
    return operator != "average" or dtype.name != "bool"


class _Parser(argparse.ArgumentParser):
    """Leaves it to the caller to print: one rank shall, not all of them."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m horovod.bench",
        description="Measure and check the collectives of this job: "
        "horovodrun -np 4 python -m horovod.bench. Without horovodrun there is one rank.",
        epilog="Sizes count as in nccl-tests: the whole buffer of an allreduce or broadcast, all that a rank "
        "receives from an allgather, all that it gives to a reducescatter or alltoall. K, M and G are 1024 "
        "to the power of 1, 2, 3. Exit status: 0, 1 if a result was wrong, 2 if the command line is.",
    )
    add = parser.add_argument
    add("collectives", nargs="*", metavar="COLLECTIVE",
        help=f"what to measure, all without it: {', '.join(COLLECTIVES)}")  # fmt: skip
    add("-b", "--begin", type=_size, default=_size("4"), help="smallest size (4)")
    add("-e", "--end", type=_size, default=_size("64M"), help="largest size (64M)")
    add("-f", "--factor", type=float, default=4.0, help="from one size to the next (4)")
    add("-d", "--dtype", type=_names(DTYPES), default=("float32",),
        help=f"one or more, with commas, or all: {', '.join(DTYPES)} (float32)")  # fmt: skip
    add("-o", "--op", type=_names(OPERATORS), default=("sum",),
        help=f"of reductions; one or more, with commas, or all: {', '.join(OPERATORS)} (sum)")  # fmt: skip
    add("-p", "--place", choices=("in", "out", "both"), default="in",
        help="allreduce and broadcast in place, into other memory, or both (in)")  # fmt: skip
    add("-n", "--iterations", type=int, default=20, help="timed calls of each size (20)")
    add("-w", "--warm-up", type=int, default=5, help="calls before them (5)")
    add("-c", "--check", type=int, choices=(0, 1), default=1, help="verify results (1)")
    add("-r", "--root", type=int, help="sender of broadcasts (the first rank)")
    add("--process-set", type=_ranks, metavar="RANKS",
        help="only these ranks, as 0,2,4-7; the others wait")  # fmt: skip
    add("--device", choices=("cpu", "cuda"), default="cpu",
        help="where the data are: host memory, or each rank's own GPU (cpu)")  # fmt: skip
    add("--json", metavar="FILE", help="write all figures there; - for standard output, no table")
    return parser


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", text.strip().upper().replace("IB", "B"))
    if match is None or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size, such as 512, 64K or 1G")
    return int(match[1]) * _UNITS[match[2]]


def _items(text: str) -> list[str]:
    """The words between commas; a comma may end the list."""
    return text.rstrip().removesuffix(",").split(",")


def _names(known: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    def read(text: str) -> tuple[str, ...]:
        names = tuple(known) if text == "all" else tuple(_items(text))
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"unknown: {name!r}; known: {', '.join(known)}")
        return names

    return read


def _ranks(text: str) -> tuple[int, ...]:
    ranks: set[int] = set()
    for part in _items(text):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if match is None:
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of ranks, such as 0,2,4-7")
        ranks.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(sorted(ranks))
