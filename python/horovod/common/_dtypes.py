"""Element types: the core's codes by the name that frameworks share, and what can be computed with them."""

from typing import Final

from horovod.common._ops import Adasum, Average, Max, Min, Product, Sum

CODES: Final = {
    "uint8": 0,
    "int8": 1,
    "uint16": 2,
    "int16": 3,
    "int32": 4,
    "int64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bool": 9,
    "bfloat16": 10,
    "uint32": 11,
    "uint64": 12,
}

# Complex numbers travel as pairs of reals, which is exact for what is linear: sums, averages and copies.
REAL_OF: Final = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}

_FLOATING: Final = ("float16", "float32", "float64", "bfloat16")

OP_NAMES: Final = {
    Average: "Average",
    Sum: "Sum",
    Adasum: "Adasum",
    Min: "Min",
    Max: "Max",
    Product: "Product",
}


def can_be_reduced(op: int, dtype: str) -> bool:
    """Whether elements of this type can be combined like that; the core itself refuses an unknown operator."""
    if dtype in REAL_OF:
        return op in (Sum, Average)
    if dtype not in CODES:
        return False
    if op == Average:
        return dtype != "bool"
    return dtype in _FLOATING if op == Adasum else True
