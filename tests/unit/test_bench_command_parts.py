"""`python -m horovod.bench`: its command line, its data, and that it sees a wrong result when there is one."""

from __future__ import annotations

import pytest

from horovod.bench import _report
from horovod.bench._collectives import Case
from horovod.bench._data import Memory, Reduction, holds, moved
from horovod.bench._options import DTYPES, OPERATORS, UsageError, parse, possible


def test_sizes_grow_by_a_factor_and_understand_units():
    assert list(parse(["-b", "1K", "-e", "64KiB", "-f", "8"]).sizes()) == [1024, 8192, 65536]
    assert list(parse(["-b", "4", "-e", "9", "-f", "1.5"]).sizes()) == [4, 6, 9]
    assert next(parse(["-b", "2g", "-e", "2G"]).sizes()) == 2 << 30


def test_all_stands_for_everything():
    options = parse(["-d", "all", "-o", "all", "-p", "both"])

    assert [dtype.name for dtype in options.dtypes] == list(DTYPES)
    assert options.operators == OPERATORS
    assert options.in_place == (True, False)


@pytest.mark.parametrize(
    ("words", "verdict"),
    [
        (["allreduces"], "unknown collective 'allreduces'; known: allreduce, allgather"),
        (["-d", "float8"], "unknown: 'float8'; known: uint8"),
        (["-o", "sum,mean"], "unknown: 'mean'; known: sum"),
        (["-b", "1X"], "'1X' is not a size"),
        (["-b", "0"], "'0' is not a size"),
        (["-b", "2K", "-e", "1K"], "--begin 2048 is more than --end 1024"),
        (["-f", "1"], "--factor must be more than 1, not 1"),
        (["-f", "nan"], "--factor must be more than 1, not nan"),
        (["-n", "0"], "at least one iteration"),
        (["--process-set", "0,x"], "'0,x' is not a list of ranks"),
        (["--no-such"], "unrecognized arguments: --no-such"),
    ],
)
def test_mistakes_are_named(words, verdict):
    with pytest.raises(UsageError, match=verdict.replace("(", r"\(")):
        parse(words)


def test_ranks_may_be_ranges():
    assert parse(["--process-set", "4-6,0,5"]).process_set == (0, 4, 5, 6)


def test_a_comma_may_stand_at_the_end_of_a_list():
    options = parse(["--process-set", "0,2,", "-d", "int8,"])

    assert options.process_set == (0, 2)
    assert [dtype.name for dtype in options.dtypes] == ["int8"]


# The core's expected results, in Python's own numbers.
COMPUTED = {
    "sum": sum,
    "adasum": sum,  # no two ranks contribute to one element: nothing to project
    "average": lambda values: sum(values) / len(values),
    "min": min,
    "max": max,
    "product": lambda values: values[0] if len(values) == 1 else values[0] * _product(values[1:]),
}


def _product(values):
    result = 1
    for value in values:
        result *= value
    return result


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize(
    ("dtype", "operator"),
    [
        pytest.param(dtype, operator, id=f"{dtype.name}-{operator}")
        for dtype in DTYPES.values()
        for operator in OPERATORS
        if possible("allreduce", dtype, operator)
    ],
)
def test_a_right_result_agrees_and_any_wrong_element_does_not(dtype, operator, ranks):
    reduction = Reduction(operator, dtype, ranks)
    assert reduction.is_exact
    columns = zip(
        *(reduction._decoded(reduction.contribution(rank)) for rank in range(ranks)), strict=True
    )
    result = [COMPUTED[operator](values) for values in columns]
    if dtype.name == "bool":
        result = [bool(value) for value in result]
    elif not dtype.is_floating:
        result = [int(value) for value in result]
    first, elements = 5, 3 * reduction.period
    data = reduction._encoded((result * 4)[first : first + elements])

    assert reduction.agrees(memoryview(data), first)
    assert not reduction.agrees(memoryview(data), first + 1), "shifted by an element"
    for element in (0, reduction.period + 3, elements - 1):
        broken = bytearray(data)
        broken[element * dtype.nbytes] ^= 1
        if dtype.is_floating and operator == "average":  # whose last bit may be rounded
            broken[(element + 1) * dtype.nbytes - 1] ^= 0x40
        assert not reduction.agrees(memoryview(broken), first), f"element {element}"


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_missing_or_doubled_rank_shows(ranks):
    reduction = Reduction("sum", DTYPES["float32"], ranks)
    parts = [reduction._decoded(reduction.contribution(rank)) for rank in range(ranks)]
    missing = [sum(values) for values in zip(*parts[1:], strict=True)]
    doubled = [sum(values) for values in zip(*parts, parts[0], strict=True)]

    for wrong in (missing, doubled):
        assert not reduction.agrees(memoryview(reduction._encoded([float(v) for v in wrong])), 0)


def test_averages_of_hosts_with_different_numbers_of_ranks_agree():
    beside = [2, 2, 1]  # of each rank, on its host
    dtype = DTYPES["float32"]
    reductions = [Reduction("adasum", dtype, 3, count) for count in beside]
    parts = [r._decoded(r.contribution(rank)) for rank, r in enumerate(reductions)]

    # An element that only one host has is added by Adasum.
    result = [(a + b) / 2 + c for a, b, c in zip(*parts, strict=True)]
    without_averages = [sum(values) for values in zip(*parts, strict=True)]

    for reduction in reductions:
        assert reduction.agrees(memoryview(reduction._encoded(result)), 0)
        assert not reduction.agrees(memoryview(reduction._encoded(without_averages)), 0)


def test_ranks_beyond_what_a_type_can_average_are_not_checked():
    assert Reduction("average", DTYPES["int8"], 127).is_exact
    assert not Reduction("average", DTYPES["int8"], 128).is_exact


def test_the_verdict_names_what_was_not_checked():
    int8 = DTYPES["int8"]

    def measured(wrong, collective, *rest):
        return _report.Measured(Case(collective, *rest), 128, (1.0,), 1.0, 1.0, wrong)

    checked = measured(0, "broadcast", int8, None, True, 8)
    average = [measured(None, "allreduce", int8, "average", True, n) for n in (8, 16)]
    barrier = measured(None, "barrier", None, None, None, 0)

    assert _report.verdict([checked]).endswith("1 of 1 cases were checked")
    assert _report.verdict([checked, *average, barrier]).endswith(
        "1 of 4 cases were checked; not checked: allreduce int8 average (not exact in this type for so many ranks), "
        "barrier (has no result)"
    )
    # Where nothing was to be checked, the list would name all that was measured.
    assert _report.verdict([barrier]).endswith("0 of 1 cases were checked")


def test_memory_is_compared_to_its_last_byte():
    period = moved(3, DTYPES["uint8"])
    memory = Memory(5000)
    memory.fill(0, 2000, moved(4, DTYPES["uint8"]))
    memory.fill(2000, 3000, period)

    assert holds(memory.view, 2000, 3000, period)
    assert not holds(memory.view, 0, 2000, period)
    for place in (2000, 4999):
        memory.view[place] ^= 1
        assert not holds(memory.view, 2000, 3000, period)
        memory.view[place] ^= 1
