"""The measured cases and their goals: the one list that ranks, tables and plots share."""

from __future__ import annotations

import math
from dataclasses import dataclass

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Target:
    """A ratio of medians in one run, or seconds: something to reach, and to report whether it is."""

    against: str  # "gloo" and "mpi": theirs / ours, at least; "floor": ours / floor, at most; "seconds": at most
    limit: float
    stretch: bool = False

    def reached(self, ratio: float) -> bool:
        """Whether a measured ratio is good enough."""
        return ratio >= self.limit if self.against in ("gloo", "mpi") else ratio <= self.limit


def at_least(**limits: float) -> tuple[Target, ...]:
    """Targets as times faster than a peer."""
    return tuple(Target(peer, limit) for peer, limit in limits.items())


def at_most(floor: float, stretch: float) -> tuple[Target, ...]:
    """Targets as multiples of the floor."""
    return Target("floor", floor), Target("floor", stretch, stretch=True)


@dataclass(frozen=True)
class Case:
    """One row: an operation on tensors, how it is called in tables, and its targets on two ranks."""

    name: str
    group: str
    operation: str  # a method of peers.Peer
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    repeats: int = 1  # times the usual number: small operations need more
    quick: bool = False  # part of a quick run
    chained: int = 1  # so many one after the other, of which one is counted
    order: tuple[
        int, ...
    ] = ()  # of the dimensions in memory, outermost first, where that is not row-major
    rows_per_rank: bool = False  # the shape's rows are meant for each of the ranks
    floor: tuple[str, str, int] | None = None  # what floor.c does, its dtype, bytes
    targets: tuple[Target, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, as the name counts them."""
        return sum(map(math.prod, self.shapes)) * ITEM_BYTES[self.dtype]


ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def resnet50_shapes() -> tuple[tuple[int, ...], ...]:
    """Shapes of ResNet-50's 161 parameters (He et al. 2015), in the order of the network."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    channels = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            convolutions = [(width, channels, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            if block == 0:
                convolutions.append((4 * width, channels, 1, 1))
            for shape in convolutions:
                shapes += [shape, (shape[0],), (shape[0],)]
            channels = 4 * width
    return (*shapes, (1000, 2048), (1000,))


def byte_text(count: int) -> str:
    """As 4 B, 16 KiB, 64 MiB."""
    for unit, size in (("MiB", MIB), ("KiB", KIB)):
        if count >= size:
            return f"{count / size:g} {unit}"
    return f"{count} B"


# allreduce of one f32 tensor: size and targets, from the least latency to the full bandwidth
_SIZES: dict[int, tuple[Target, ...]] = {
    4: (*at_least(gloo=8), Target("mpi", 1, stretch=True)),
    64: (),
    KIB: (),
    4 * KIB: (),
    16 * KIB: (),
    64 * KIB: (),
    256 * KIB: (),
    MIB: (*at_least(gloo=4), *at_most(7, stretch=4)),
    8 * MIB: (*at_least(gloo=4), *at_most(3, stretch=2)),
    64 * MIB: (*at_least(gloo=3.8), *at_most(2, stretch=1.6)),
}
_QUICK_SIZES = (4, 64 * KIB, MIB, 8 * MIB, 64 * MIB)


def _cases() -> tuple[Case, ...]:
    cases = [
        Case(
            f"allreduce f32 {byte_text(size)}",
            "latency" if size < 256 * KIB else "sizes",
            "allreduce",
            "float32",
            ((size // 4,),),
            repeats=6 if size <= MIB else 1,
            quick=size in _QUICK_SIZES,
            floor=("allreduce", "f32", size),
            targets=targets,
        )
        for size, targets in _SIZES.items()
    ]
    cases += [
        Case(
            f"allreduce {short} 32 MiB",
            "halves",
            "allreduce",
            dtype,
            ((16 * MIB,),),
            quick=True,
            floor=("allreduce", short, 32 * MIB),
            targets=(*at_least(gloo=6), *at_most(2.6, stretch=1.8)),
        )
        for dtype, short in (("float16", "f16"), ("bfloat16", "bf16"))
    ]
    resnet = resnet50_shapes()
    cases += [
        Case(
            "1000 tensors of 1 KiB",
            "many",
            "allreduce",
            "float32",
            ((256,),) * 1000,
            quick=True,
            targets=(*at_least(gloo=100), Target("seconds", 2e-3, stretch=True)),
        ),
        Case(
            f"ResNet-50's {len(resnet)} gradients",
            "resnet",
            "allreduce",
            "float32",
            resnet,
            quick=True,
            floor=("allreduce", "f32", sum(map(math.prod, resnet)) * 4),
            targets=(*at_least(gloo=5), *at_most(2.1, stretch=1.7)),
        ),
        Case(
            "broadcast f32 64 MiB",
            "gather",
            "broadcast",
            "float32",
            ((16 * MIB,),),
            quick=True,
            floor=("spread", "-", 64 * MIB),
            targets=(*at_least(gloo=2), Target("floor", 1, stretch=True)),
        ),
    ]
    cases += [
        Case(
            name,
            "gather",
            operation,
            "float32",
            ((4 * KIB, KIB),),
            quick=True,
            rows_per_rank=operation != "allgather",
            floor=("gather", "-", 16 * MIB),
            targets=(*at_least(gloo=4), Target("floor", 1, stretch=True)),
        )
        for name, operation in (
            ("allgather f32 16 MiB each", "allgather"),
            ("reducescatter f32 to 16 MiB each", "reducescatter"),
            ("alltoall f32 16 MiB to each", "alltoall"),
        )
    ]
    cases += [
        Case(
            f"allreduce f32 16 MiB, {name}",
            "orders",
            "allreduce",
            "float32",
            ((32, 128, 32, 32),),
            order=order,
            floor=("allreduce", "f32", 16 * MIB),
        )
        for name, order in (
            ("contiguous", ()),
            ("channels-last", (0, 2, 3, 1)),
            ("transposed", (3, 2, 1, 0)),
        )
    ]
    cases += [
        Case(
            f"ends as calls: allreduce f32 {byte_text(size)}",
            "calls",
            "chain",
            "float32",
            ((size // 4,),),
            repeats=6,
            quick=True,
            chained=16,
            floor=("allreduce", "f32", size),
        )
        for size in (4, MIB)
    ]
    return tuple(cases)


CASES = _cases()
GROUPS = tuple(dict.fromkeys(case.group for case in CASES))


def targets_of(case: Case, ranks: int) -> tuple[Target, ...]:
    """The goals on two ranks; with more ranks than processors, that peers are never faster."""
    if ranks == 2:
        return case.targets
    if case.operation == "chain" or case.order:
        return ()
    gloo = 8.0 if case.group == "resnet" else 1.0
    return at_least(gloo=gloo, mpi=0.25 if case.nbytes == 4 else 1.0)
