"""The table of mistakes: disagreements between ranks, and requests that are invalid on any rank.

Each mistake is made in every form of its operation that the framework has. The error has the fault's class and matches
the texts. Operands are unchanged, and the next operation works on all ranks.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from conformance import oracle
from conformance.adapter import Fault, Form
from conformance.cases import even
from horovod.common import api as job

UNREGISTERED = r"This process set is not registered, or was removed: pass it to hvd\.init"


class By(Enum):
    """The ranks that make a mistake."""

    ALL = "all ranks, and all of them hear of it"
    FIRST = "rank 0 alone: it is found at the call, and nothing was sent"


@dataclass(frozen=True)
class Mistake:
    """Shapes, element types and options are the same on all ranks, but what the `last` rank has instead."""

    name: str
    operation: str
    fault: Fault
    text: tuple[str, ...]
    """Regular expressions; `{name}` is the operation's name."""
    shape: object = (12,)
    dtype: str = "float32"
    options: dict = field(default_factory=dict)
    """`process_set` and `splits` may be functions of the process sets or of the number of ranks."""
    last: dict = field(default_factory=dict)
    by: By = By.ALL
    ranks: int = 1
    """The smallest number of ranks that can make it."""
    forms: tuple[Form, ...] = tuple(Form)
    group: int = 2
    """How many tensors a group has; the last one is the wrong one."""
    tensor: Callable | None = None
    """Makes the object that is passed instead of a tensor."""

    @property
    def id(self):
        """Names it."""
        return f"{self.operation}-{self.name}".replace(" ", "_")

    def concerns(self, rank):
        """Whether a rank makes it."""
        return self.by is By.ALL or rank == 0

    def shapes(self, size):
        """Those that ranks bring."""
        shapes = (self.shape, self.last.get("shape", self.shape))
        return [shape(0, size) if callable(shape) else shape for shape in shapes]

    def texts(self, name):
        """The regular expressions that the error has to match."""
        return [text.replace("{name}", re.escape(name)) for text in self.text]

    def program(self, adapter, form, name, sets):
        """The wrong tensor of this rank, and what is to be called with it."""
        size, rank = job.size(), job.rank()
        mine = {"shape": self.shape, "dtype": self.dtype, "group": self.group, **self.options}
        if rank == size - 1:
            mine.update(self.last)
        shape, dtype, group = (mine.pop(key) for key in ("shape", "dtype", "group"))
        shape = shape(rank, size) if callable(shape) else shape
        options = {key: _resolved(adapter, key, value, sets) for key, value in mine.items()}
        if self.by is By.ALL:
            options.setdefault("name", name)
        positional = [options.pop("root_rank", 0)] if self.operation == "broadcast" else []
        function = adapter.function(form, self.operation)

        def program(tensors):
            tensor = self.tensor() if self.tensor else tensors[0]
            if form.is_group:
                others = [adapter.beside(tensor) for _ in range(group - 1)]
                result = function([*others, tensor] if group else [], *positional, **options)
            else:
                result = function(tensor, *positional, **options)
            return adapter.synchronize(result) if form.is_async else result

        ones = np.ones(shape, oracle.storage(dtype))
        return adapter.make(ones, dtype), program


def _resolved(adapter, key, value, sets):
    if key == "op":
        return getattr(adapter.hvd, value) if value in _OPERATORS else value
    if key == "process_set":
        return value(sets)
    if key == "splits":
        return value(job.size())
    return value


_OPERATORS = ("Sum", "Average", "Min", "Max", "Product", "Adasum")
OPERATIONS = ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter")
GROUPS = tuple(form for form in Form if form.is_group)
SINGLE = tuple(form for form in Form if not form.is_group)


def disagreements():
    """Between two ranks or more. Every rank gets the error, with the tensor's name and both values."""
    two = {"fault": Fault.DISAGREEMENT, "ranks": 2}
    for operation in OPERATIONS:
        dtypes = {"shape": even(2), "last": {"dtype": "int32"}}
        yield Mistake(
            "element types differ",
            operation,
            text=("Mismatched data types", "{name}"),
            **dtypes,
            **two,
        )
        shapes = {"shape": even(2, 2), "last": {"shape": even(2, 3)}}
        if operation in ("allreduce", "broadcast"):
            shapes = {"shape": (2,), "last": {"shape": (3,)}}
        text = (r"Mismatched [A-Z]+ tensor shapes", "{name}", r"\b2\b", r"\b3\b")
        yield Mistake("shapes differ", operation, text=text, **shapes, **two)
    for operation in ("allreduce", "allgather", "broadcast"):
        dimensions = {"shape": (4, 1), "last": {"shape": (4,)}}
        text = (
            r"Mismatched [A-Z]+ tensor shapes",
            "{name}",
            r"\[4, 1\]|of rank 2",
            r"\[4\]|of rank 1",
        )
        yield Mistake("dimensions differ", operation, text=text, **dimensions, **two)
    for operation in ("allreduce", "reducescatter"):
        for factor in ("prescale_factor", "postscale_factor"):
            factors = {"options": {factor: 1.5, "op": "Sum"}, "last": {factor: 2.0}}
            text = ("Mismatched prescale and/or postscale factors", "{name}")
            yield Mistake(f"{factor}s differ", operation, text=text, **factors, **two)
    operators = {"options": {"op": "Max"}, "last": {"op": "Min"}}
    text = (r"Mismatched reduction op", r"reduction op (Min|Max), .* op (Max|Min)\.", "{name}")
    yield Mistake("operators differ", "allreduce", text=text, **operators, **two)
    operators = {"options": {"op": "Adasum"}, "last": {"op": "Sum"}}
    text = ("Mismatched (reduction operation|reduction op|operations)", "{name}")
    yield Mistake("operators differ Adasum", "allreduce", text=text, **operators, **two)
    roots = {"options": {"root_rank": 0}, "last": {"root_rank": 1}}
    text = ("Mismatched BROADCAST root ranks", "{name}")
    yield Mistake("roots differ", "broadcast", text=text, **roots, **two)
    for operation in ("allreduce", "allgather", "reducescatter"):
        sizes = {"group": 2, "last": {"group": 3}, "forms": GROUPS}
        text = (f"grouped_{operation}|group size", "{name}")
        yield Mistake("group sizes differ", operation, text=text, **sizes, **two)
        member = {"shape": (12, 2), "last": {"shape": (12, 3)}, "group": 3, "forms": GROUPS}
        yield Mistake("member differs", operation, text=("_3of3", "{name}"), **member, **two)


def of_results():
    """Requests that the core refuses on every rank."""
    refused = {
        "fault": Fault.RESULT,
        "text": ("only supports AVERAGE and SUM|op Average and Sum only",),
    }
    for op in ("Min", "Max", "Product", "Adasum"):
        for dtype in ("float32", "int32", "complex64"):
            row = {"options": {"op": op}, "dtype": dtype, **refused}
            yield Mistake(f"{op} of {dtype}", "reducescatter", **row)
    for operation in ("allgather", "alltoall"):
        for dtype in ("float32", "complex64"):
            text = ("rank-zero tensor|at least one dimension|at least rank 1|scalar|needs rows",)
            scalar = {"shape": (), "dtype": dtype, "fault": Fault.RESULT, "forms": SINGLE}
            yield Mistake(f"scalar {dtype}", operation, text=text, **scalar)


def _set_of(id_):
    def make(_):
        unknown = job.ProcessSet([0])
        unknown.process_set_id = id_
        return unknown

    return make


SPLITS = (
    ("two dimensions", lambda n: [[1] * n], "expects a 1D|1D splits"),
    ("no integers", lambda n: [0.5] * n, "integer|splits|int32"),
    ("text", lambda n: ["a"] * n, "integer|splits|int32"),
    ("one too many", lambda n: [0] * (n + 1), "Number of entries in splits does not equal|expects"),
    ("more than there are", lambda n: [1000] * n, "Sum of splits entries is greater|expects"),
    ("negative", lambda n: [-1] + [0] * (n - 1), "negative"),
)


def of_arguments():
    """Found at the call of one rank: nothing is sent to the others."""
    argument = {"fault": Fault.ARGUMENT, "by": By.FIRST}
    for root in (-1, 100):
        text = (f"invalid root rank {root}",)
        yield Mistake(
            f"root {root}", "broadcast", text=text, options={"root_rank": root}, **argument
        )
    for dtype in ("float32", "complex64"):
        text = (
            "[Rr]educescatter does not support scalar inputs|at least one dimension|at least rank 1|needs rows",
        )
        yield Mistake(
            f"scalar {dtype}", "reducescatter", text=text, shape=(), dtype=dtype, **argument
        )
    for name, splits, text in SPLITS:
        row = {"options": {"splits": splits}, "shape": even(2), **argument}
        yield Mistake(f"splits {name}", "alltoall", text=(text,), **row)
    rows = {"shape": lambda rank, size: (size + 1,), "ranks": 2, **argument}
    yield Mistake("rows do not divide", "alltoall", text=("even multiple|pad it",), **rows)
    for op, spelled in (("mean", "word"), ("", "nothing"), (1.0, "number")):
        text = ("not an operator of Horovod: expected ",)
        for operation in ("allreduce", "reducescatter"):
            row = {"options": {"op": op}, "text": text, **argument}
            yield Mistake(f"operator {spelled}", operation, **row)
    for operation in ("allreduce", "allgather", "reducescatter"):
        empty = {"group": 0, "forms": GROUPS, "text": ("at least one|empty list",), **argument}
        yield Mistake("empty group", operation, **empty)


def of_sets_and_types():
    """Also found at the call."""
    for operation in OPERATIONS:
        one = {"by": By.FIRST, "shape": even(2)}
        name = {"options": {"name": 3}, "text": ("",), "fault": Fault.TYPE, **one}
        yield Mistake("name is a number", operation, **name)
        unregistered = {"options": {"process_set": lambda _: job.ProcessSet([0])}, **one}
        unregistered |= {"text": (UNREGISTERED,), "fault": Fault.UNREGISTERED}
        yield Mistake("set is not registered", operation, **unregistered)
        text = ("does not exist,? or has not been registered|Invalid process set",)
        unknown = {"options": {"process_set": _set_of(12345)}, "text": text, **one}
        yield Mistake("set is unknown", operation, fault=Fault.ARGUMENT, **unknown)
        text = (r"Rank \d is not a member of the provided process set|Invalid process set id|root",)
        foreign = {"options": {"process_set": lambda sets: sets.other}, "text": text, "ranks": 2}
        foreign |= {"shape": even(2)}
        yield Mistake("set of others", operation, fault=Fault.ARGUMENT, **foreign)
    outside = {"process_set": lambda sets: sets.mine, "root_rank": 1}
    text = ("invalid root rank",)
    yield Mistake(
        "root is no member",
        "broadcast",
        fault=Fault.ARGUMENT,
        text=text,
        options=outside,
        by=By.FIRST,
        ranks=2,
    )


def of_dtypes():
    """Elements that an operator does not combine."""
    for operation, op, dtype in (
        ("allreduce", "Average", "bool"),
        ("reducescatter", "Average", "bool"),
        ("allreduce", "Adasum", "int32"),
        ("allreduce", "Adasum", "bool"),
        ("allreduce", "Adasum", "complex64"),
        ("allreduce", "Max", "complex64"),
        ("allreduce", "Product", "complex128"),
        ("allreduce", "Sum", "float8_e4m3fn"),
        ("allreduce", "Sum", "float8_e5m2"),
        ("reducescatter", "Sum", "float8_e4m3fn"),
        ("reducescatter", "Sum", "float8_e5m2"),
    ):
        row = {"options": {"op": op}, "dtype": dtype, "shape": even(2), "by": By.FIRST}
        text = (f"not supported for op {op}|(is|are) not supported|{op} works on|averaged|Allowed",)
        yield Mistake(f"{op} of {dtype}", operation, Fault.DTYPE, text, **row)


def of_no_tensors(adapter):
    """Objects that a framework refuses as tensors."""
    for operation in OPERATIONS:
        for name, (make, fault, text) in adapter.no_tensors.items():
            row = {"tensor": make, "by": By.FIRST, "text": (text,)}
            yield Mistake(f"no tensor {name}", operation, fault, **row)


def mistakes_of(adapter, size):
    """All that can be made with an adapter in a job of so many ranks."""
    tables = (disagreements(), of_results(), of_arguments(), of_sets_and_types(), of_dtypes())
    for table in (*tables, of_no_tensors(adapter)):
        for mistake in table:
            if (
                mistake.ranks <= size
                and mistake.dtype in adapter.dtypes
                and all(adapter.can_hold(shape) for shape in mistake.shapes(size))
                and adapter.has(mistake.operation, mistake.name, mistake.id)
                and adapter.has(mistake.options.get("op", ""), *mistake.options)
            ):
                yield mistake
