"""The table of results: a row for each operation, operator, set of values and shapes, with the element types it is for.

A row becomes one case for each element type that a framework has. A case runs in every form that the framework has
(new, in place, asynchronous, grouped ...) on all of the row's shapes.

Traced and compiled programs run fewer cases, because each case costs more there: every operation, operator and element
type, every kind of shape once, and no row about the core.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from conformance import oracle
from conformance.adapter import COMPLEX, FLOATS, INTEGERS, MOVABLE, NATIVE, Extent, Form

SHORT = (Form.NEW, Form.IN_PLACE)
NUMBERS = tuple(dtype for dtype in NATIVE if dtype != "bool")


class Members(Enum):
    """The ranks that take part."""

    ALL = "all ranks"
    HALF = "the even ranks and the odd ones, each in their process set"


class About(Enum):
    """The component that a row tests."""

    ADAPTER = "what an adapter makes of the call"
    CORE = "what the core computes: tried in one mode of each adapter"


class Names(Enum):
    """How operations are named."""

    NONE = "not"
    DISTINCT = "each by its own; odd ranks start them in the opposite order"
    SAME = "all by the same, one after the other"


@dataclass(frozen=True)
class Row:
    """Shapes are tuples, or functions of a rank and the number of members where those differ."""

    name: str
    operation: str
    dtypes: tuple[str, ...]
    shapes: tuple
    values: Callable = oracle.whole
    op: str | None = None
    before: float = 1.0
    after: float = 1.0
    splits: Callable | None = None
    """Of a rank and the number of members: how many rows go to each."""
    members: Members = Members.ALL
    names: Names = Names.NONE
    forms: tuple[Form, ...] = tuple(Form)
    layout: str = ""
    about: About = About.ADAPTER
    ranks: tuple[int, int] = (1, 1000)
    """The smallest and the largest number of ranks for which the row makes sense."""

    def id(self, dtype):
        """Names a case of it."""
        words = [self.operation, self.op, dtype, self.name, self.layout]
        return "-".join(word.replace(" ", "_") for word in words if word)


@dataclass(frozen=True)
class Case:
    """A row for one element type; `dtypes` are those of its operands where they differ."""

    row: Row
    dtype: str
    id: str
    operands: tuple[int, ...]
    """Which of the row's shapes."""
    dtypes: tuple[str, ...] = ()

    def dtype_of(self, operand):
        """The element type of an operand."""
        return self.dtypes[operand % len(self.dtypes)] if self.dtypes else self.dtype

    @property
    def tolerance(self):
        """How far results may be off: not at all where every step is exact."""
        row = self.row
        is_exact = row.values in (oracle.whole, oracle.distinct) and row.op != "Average"
        if (is_exact and row.before in (1, 2, 0.5)) or oracle.kind(self.dtype) in "iub":
            return 0.0
        return oracle.PRECISION.get(self.dtype, 1e-12)


def even(rows, *tail):
    """The same number of rows for each member."""

    def shape(rank, members):
        return (rows * members, *tail)

    return shape


def ragged(counts, *tail):
    """Numbers of rows that differ between ranks."""

    def shape(rank, members):
        return (counts[rank % len(counts)], *tail)

    return shape


def uneven_splits(rank, members):
    """With zeros: rank r sends (r + d) % 3 rows to member d."""
    return [(rank + d) % 3 for d in range(members)]


def sent(splits, surplus=0, *tail):
    """The rows that the splits send, and `surplus` rows that are not sent."""

    def shape(rank, members):
        return (sum(splits(rank, members)) + surplus, *tail)

    return shape


SHAPES = ((), (1,), (0,), (0, 3), (3,), (17,), (4, 5), (2, 3, 4), (1, 0, 2), (2, 1, 2, 1, 2))
# One of every kind, where a case costs more.
FEW_SHAPES = ((), (1,), (0, 3), (17,), (2, 3, 4))
SPLIT = (uneven_splits, lambda r, n: [0] * n, lambda r, n: [2] + [0] * (n - 1))
SPLIT_NAMES = ("uneven", "of nothing", "all to one")
SCALED = (
    ("Sum", (2.0, 0.5), (*FLOATS, "int32", "int64", "complex64")),
    ("Sum", (0.5, 1.0), ("int32", "int8")),
    ("Sum", (0.1, 1.0), ("float64",)),
    ("Sum", (1.0, 0.1), ("float64",)),
    ("Sum", (0.0, 1.0), ("float64", "float32")),
    ("Average", (1.0, 2.0), ("uint8", "int32", "int64")),
    ("Average", (1.0, 0.5), ("uint8", "int32", "int64")),
    ("Average", (1.0, 3.0), ("uint8", "int32", "int64")),
    ("Min", (3.0, 2.0), ("float32",)),
)


def reductions():
    """Of allreduce."""
    for op in ("Sum", "Average", "Min", "Max", "Product"):
        dtypes = {"Sum": NATIVE + COMPLEX, "Average": NUMBERS + COMPLEX}.get(op, NATIVE)
        yield Row("", "allreduce", dtypes, SHAPES, op=op)
    yield Row("default", "allreduce", ("float32",), ((4,), (2, 3)))
    for op in ("sum", "average", "min", "MAX", "product"):
        yield Row("by name", "allreduce", ("float32",), ((4,),), op=op)
    core = {"about": About.CORE}
    for value in (1, 3, 7, 20, "max", "min"):
        # Multiplied by 1/size, some become one less; summed in their own type, the largest wrap around.
        made = oracle.constant(value)
        yield Row(f"of {value}", "allreduce", INTEGERS, ((70,),), made, op="Average", **core)
    for op, (before, after), dtypes in SCALED:
        name = f"times {before} and {after}"
        options = {"op": op, "before": before, "after": after}
        yield Row(name, "allreduce", dtypes, ((6,), (2, 3)), **options)
    yield Row(
        "in float32", "allreduce", ("float16",), ((1,), (5,)), oracle.absorbed, op="Sum", **core
    )
    large = ((1,), (1000,), (65_537,), (1_000_003,))
    yield Row("large", "allreduce", FLOATS, large, oracle.normal, op="Sum", forms=SHORT, **core)
    for values in (oracle.equal, oracle.orthogonal):
        name = f"of {values.__name__}"
        yield Row(name, "allreduce", FLOATS, ((50,), (5, 7)), values, op="Adasum")
    two = {"op": "Adasum", "ranks": (2, 2), **core}
    yield Row("of two", "allreduce", ("float64", "float32"), ((20,),), oracle.normal, **two)
    many = tuple((n % 40,) for n in range(200))
    concurrent = (Form.ASYNC, Form.ASYNC_IN_PLACE, Form.GROUP)
    yield Row("in flight", "allreduce", ("float32",), many, op="Sum", forms=concurrent, **core)


def movements():
    """Of allgather and broadcast."""
    moved = oracle.distinct
    yield Row("", "allgather", MOVABLE, ((4,), (4, 3), (4, 2, 1, 2), (2, 0)), moved)
    counts = ((1, 2, 3, 4), (0, 5, 0, 1), (7, 0, 0, 0), (0, 0, 0, 0), (3, 0, 0, 2))
    rows = tuple(ragged(c, *tail) for c in counts for tail in ((), (3,), (2, 1)))
    yield Row("ragged", "allgather", MOVABLE, rows, moved)
    yield Row(
        "large", "allgather", ("float32",), ((300_001, 2),), moved, forms=SHORT, about=About.CORE
    )
    yield Row("", "broadcast", MOVABLE, SHAPES, moved)
    yield Row(
        "large", "broadcast", ("float32",), ((700_001,),), moved, forms=SHORT, about=About.CORE
    )


def exchanges():
    """Of alltoall and reducescatter."""
    moved = oracle.distinct
    shapes = (even(2, 3), even(1), even(3, 2, 1), even(1, 0), even(0, 2))
    yield Row("", "alltoall", MOVABLE, shapes, moved)
    for name, splits in zip(SPLIT_NAMES, SPLIT, strict=True):
        shapes = tuple(sent(splits, surplus, *tail) for surplus in (0, 2) for tail in ((), (3,)))
        yield Row(f"split {name}", "alltoall", MOVABLE, shapes, moved, splits=splits)
    shapes = (even(1), even(2, 3), (0, 3), even(3, 2, 1), even(2, 0))
    uneven = ((1,), (2,), (7, 3), (8, 2), (5, 0), (13, 2, 2))
    for op in ("Sum", "Average"):
        dtypes = (NATIVE if op == "Sum" else NUMBERS) + COMPLEX
        yield Row("", "reducescatter", dtypes, shapes, op=op)
        yield Row("uneven", "reducescatter", dtypes, uneven, op=op)
    yield Row("default", "reducescatter", ("float32",), (even(2, 2),))
    yield Row("by name", "reducescatter", ("float32",), (even(2, 2),), op="sum")
    for before, after in ((3.0, 0.5), (1.0, 0.1), (2.0, 1.0)):
        name, scales = f"times {before} and {after}", {"before": before, "after": after}
        yield Row(name, "reducescatter", ("float64", "float32"), shapes[:2], op="Sum", **scales)
    for factor in (2.0, 0.5, 3.0):
        name = f"times 1.0 and {factor}"
        integers = ("int32", "int64")
        yield Row(name, "reducescatter", integers, shapes[:2], op="Average", after=factor)
    uneven = ((1001, 3), (7,))
    yield Row(
        "of gradients", "reducescatter", FLOATS, uneven, oracle.normal, op="Sum", about=About.CORE
    )
    big = {"op": "Sum", "before": 3.0, "about": About.CORE}
    yield Row("large", "reducescatter", ("float32",), (even(70_000),), **big)


OPERATIONS = {
    "allreduce": {"op": "Sum", "shapes": ((5,), (), (2, 3), (0,))},
    "allgather": {"values": oracle.distinct, "shapes": ((3,), (2, 3))},
    "broadcast": {"values": oracle.distinct, "shapes": ((5,), (), (2, 3))},
    "alltoall": {"values": oracle.distinct, "shapes": (even(2, 3), even(1))},
    "reducescatter": {"op": "Sum", "shapes": (even(1), even(2, 3))},
}


def everywhere():
    """Rows for every operation: in process sets, with names."""
    for operation, options in OPERATIONS.items():
        in_set = {"members": Members.HALF, **options}
        yield Row("in a set", operation, ("float32", "int32"), ranks=(2, 1000), **in_set)
        for names in (Names.DISTINCT, Names.SAME):
            title = f"names {names.name.lower()}"
            yield Row(title, operation, ("float32",), names=names, **options)
    average = {"op": "Average", "shapes": ((5,), (2, 3))}
    in_set = {"members": Members.HALF, "ranks": (2, 1000)}
    for op in ("Average", "Max"):
        options = {**average, "op": op, **in_set}
        yield Row("in a set", "allreduce", ("float32", "int32"), **options)
    scattered = {**average, "shapes": (even(1), even(2, 3)), **in_set}
    yield Row("in a set", "reducescatter", ("float32",), **scattered)
    adasum = {"op": "Adasum", "shapes": ((5,),), "values": oracle.equal, **in_set}
    yield Row("in a set", "allreduce", ("float32",), **adasum)
    split = {"splits": uneven_splits, "shapes": (sent(uneven_splits, 0, 2),), **in_set}
    yield Row("split in a set", "alltoall", ("float32",), values=oracle.distinct, **split)
    counted = {"values": oracle.distinct, "shapes": (ragged((1, 0, 2)),), **in_set}
    yield Row("ragged in a set", "allgather", ("float32",), **counted)


def layouts(names):
    """Tensors that do not lie row by row in memory."""
    for name in names:
        for operation, op in (("allreduce", "Sum"), ("broadcast", None), ("allgather", None)):
            values = oracle.whole if op else oracle.distinct
            dtypes = ("float32", "float64", "bfloat16", "int64", "complex64")
            shapes = ((4, 6), (2, 3, 4, 5))
            yield Row("laid out", operation, dtypes, shapes, values, op=op, layout=name)


GROUPS = (
    ("allreduce", "Sum", ((3,), (2, 5), (), (0, 4), (5,)), oracle.whole),
    ("allgather", None, ((2,), (1, 5), (3, 2), (0, 4), (5,)), oracle.distinct),
    ("reducescatter", "Sum", (even(1), even(2, 5), even(3, 2), even(2, 0), even(5)), oracle.whole),
)
MIXED = ("float32", "int32", "float16", "uint8", "complex64", "int64", "bfloat16", "bool")


def cases_of(adapter, size):
    """All cases for an adapter in a job of so many ranks."""
    rows = [*reductions(), *movements(), *exchanges(), *everywhere(), *layouts(adapter.layouts)]
    for row in rows:
        is_repeated = row.about is About.CORE and adapter.extent is Extent.KINDS
        if is_repeated or not row.ranks[0] <= size <= row.ranks[1]:
            continue
        names = (row.operation, row.name, row.op, "splits" if row.splits else "")
        if not adapter.has(*names, f"{row.name}/{row.operation}", f"{row.name}/{row.op}"):
            continue
        operands = _operands(adapter, row, size)
        for dtype in row.dtypes if operands else ():
            if dtype in adapter.dtypes and adapter.has(f"{row.op}/{dtype}"):
                yield Case(row, dtype, row.id(dtype), operands)
    for operation, op, shapes, values in GROUPS:
        if adapter.has(operation, "mixed"):
            mixed = tuple(dtype for dtype in MIXED if dtype in adapter.dtypes)
            groups = tuple(form for form in Form if form.is_group)
            row = Row("mixed", operation, ("float32",), shapes, values, op=op, forms=groups)
            operands = _operands(adapter, row, size)
            yield Case(row, "float32", row.id("types"), operands, mixed)


def _operands(adapter, row, size):
    def can_hold(shape):
        if adapter.extent is Extent.KINDS and row.shapes is SHAPES:
            return shape in FEW_SHAPES
        return adapter.can_hold(shape(0, size) if callable(shape) else shape)

    return tuple(i for i, shape in enumerate(row.shapes) if can_hold(shape))
