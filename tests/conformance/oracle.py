"""Operands that every rank can compute for every other, and the results of every operation, in NumPy.

Elements have NumPy's type of the same name. Values of types that NumPy lacks are held exactly in a wider one.
"""

import functools
import zlib

import numpy as np

WIDER = {"bfloat16": "float32", "float8_e4m3fn": "float32", "float8_e5m2": "float32"}
# Tolerances of results with intermediate rounding; they follow from the bits of the mantissa.
PRECISION = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 1e-5, "complex64": 1e-5}


def storage(dtype):
    """NumPy's type that holds elements of this name."""
    return np.dtype(WIDER.get(dtype, dtype))


def kind(dtype):
    """`b`ool, signed `i`nteger, `u`nsigned, `f`loat or `c`omplex."""
    return storage(dtype).kind


def rounded(values, dtype):
    """The values as elements of this type, rounded to nearest even: bfloat16 is half of a float32."""
    values = np.asarray(values)
    if dtype != "bfloat16":
        return values.astype(storage(dtype))
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return bits.view(np.float32).reshape(values.shape)


# -- operands


def whole(rank, shape, dtype, salt="", size=2):
    """Whole numbers so small that every sum and product of them is exact in every type."""
    dice = np.random.RandomState(zlib.crc32(f"{rank} {shape} {dtype} {salt}".encode()))

    def values(low, high):
        return dice.randint(low, high, shape or (1,)).reshape(shape)

    if kind(dtype) == "b":
        return values(0, 2).astype(bool)
    if kind(dtype) == "c":
        return (values(-size, size + 1) + 1j * values(-size, size + 1)).astype(dtype)
    return values(0 if kind(dtype) == "u" else -size, size + 1).astype(storage(dtype))


def distinct(rank, shape, dtype, salt=""):
    """Whole numbers that show where a row came from: for what only moves elements."""
    return whole(rank, shape, dtype, salt, size=8)


def normal(rank, shape, dtype, salt=""):
    """Numbers as gradients are."""
    dice = np.random.RandomState(zlib.crc32(f"{rank} {shape} {salt}".encode()))
    return rounded(dice.standard_normal(shape), dtype)


def equal(rank, shape, dtype, salt=""):
    """The same on all ranks."""
    return normal(0, shape, dtype, salt)


def orthogonal(rank, shape, dtype, salt=""):
    """Each rank has its own elements, the others have zeros there."""
    values = np.zeros(shape)
    values.reshape(-1)[rank::5] = rank + 1
    return rounded(values, dtype)


def absorbed(rank, shape, dtype, salt=""):
    """2048 and ones: summed in float16, pair by pair, it stays 2048."""
    return np.full(shape, 2048.0 if rank == 0 else 1.0, storage(dtype))


def constant(value):
    """The same value everywhere; `max` and `min` are those of the type."""

    def make(rank, shape, dtype, salt=""):
        number = getattr(np.iinfo(dtype), value) if isinstance(value, str) else value
        return np.full(shape, number, storage(dtype))

    make.__name__ = str(value)
    return make


# -- results


def _whole_quotient(number, divisor):
    quotient = abs(number) // divisor
    return quotient if number >= 0 else -quotient


def _scaled(values, factor, dtype):
    """Integers are truncated toward zero."""
    if factor == 1.0:
        return values
    return np.trunc(values.astype(np.float64) * factor) if kind(dtype) in "iu" else values * factor


def reduced(arrays, dtype, op, before=1.0, after=1.0):
    """An allreduce of these arrays: computed in a wide type and rounded once."""
    n = len(arrays)
    if kind(dtype) == "b":
        stacked = np.stack(arrays)
        return stacked.any(0) if op in ("Sum", "Max") else stacked.all(0)
    if op == "Adasum":
        wide = [array.astype(np.float64) for array in arrays]
        return rounded(functools.reduce(_adasum, wide), dtype)
    if kind(dtype) in "iu" and op in ("Sum", "Average") and before == 1.0:
        # Python's integers: sums of the largest ones are exact.
        total = sum(array.astype(object) for array in arrays)
        if op == "Average" and after == 1.0:
            total = np.frompyfunc(lambda x: _whole_quotient(x, n), 1, 1)(total)
        elif after != 1.0:
            after = after / n if op == "Average" else after
            total = np.frompyfunc(lambda x: int(x * after), 1, 1)(total)
        wrap = np.frompyfunc(lambda x: x % (1 << 64), 1, 1)
        return np.asarray(wrap(total)).astype(np.uint64).astype(dtype)
    wide = np.complex128 if kind(dtype) == "c" else np.float64
    stacked = np.stack([_scaled(array, before, dtype).astype(wide) for array in arrays])
    if op in ("Sum", "Average"):
        result = stacked.sum(0) / (n if op == "Average" else 1)
    else:
        result = {"Min": np.min, "Max": np.max, "Product": np.prod}[op](stacked, axis=0)
    return rounded(_scaled(result, after, dtype), dtype)


def _adasum(a, b):
    """The published formula for two vectors. Of equal or orthogonal ones the order of pairs does not matter."""
    dot, aa, bb = (a * b).sum(), (a * a).sum(), (b * b).sum()
    return (1 - dot / (2 * aa)) * a + (1 - dot / (2 * bb)) * b if aa and bb else a + b


def share(array, member, members):
    """The rows of a reduced array that a member keeps: the first ones have one more."""
    rows, longer = divmod(len(array), members)
    start = member * rows + min(member, longer)
    return array[start : start + rows + (member < longer)]


def exchanged(arrays, splits, member):
    """The rows that a member receives in an alltoall, by the splits of all senders."""
    parts = []
    for array, counts in zip(arrays, splits, strict=True):
        start = sum(counts[:member])
        parts.append(array[start : start + counts[member]])
    return np.concatenate(parts), np.array([counts[member] for counts in splits], np.int32)


def same(got, want, tolerance=0.0, what=""):
    """Same type, shape and values."""
    (values, dtype), (expected, expected_dtype) = got, want
    assert dtype == expected_dtype, f"{what}: element type {dtype}, not {expected_dtype}"
    assert values.shape == expected.shape, f"{what}: shape {values.shape}, not {expected.shape}"
    if tolerance:
        np.testing.assert_allclose(values, expected, rtol=tolerance, atol=tolerance, err_msg=what)
    elif not np.array_equal(values, expected):
        np.testing.assert_array_equal(values, expected, err_msg=what)
