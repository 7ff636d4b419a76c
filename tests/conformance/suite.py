"""Runs the tables on an adapter, as a test class: `class TestTorch(Conformance): adapters = [Torch()]`.

Every rank runs the same tests, in a job that has two process sets, of the even ranks and of the odd ones.
"""

import functools
import os
import re
import zlib
from dataclasses import dataclass

import numpy as np
import pytest

from conformance import oracle
from conformance.adapter import Adapter, Fault, Form, Packing
from conformance.cases import Case, Members, Names, cases_of
from conformance.mistakes import OPERATIONS, mistakes_of
from horovod.common import api as job

SIZE, RANK = int(os.environ.get("HOROVOD_SIZE", "1")), int(os.environ.get("HOROVOD_RANK", "0"))
OPERATORS = ("Sum", "Average", "Min", "Max", "Product", "Adasum")


@dataclass
class Sets:
    """The process sets of this job, from this rank's view."""

    halves: list
    mine: job.ProcessSet
    other: job.ProcessSet | None = None


def operator(hvd, op):
    """The operator of the table; its other spellings are given as they are."""
    return getattr(hvd, op) if op in OPERATORS else op


class Facts:
    """The contributions of all ranks to a case, and the expected result on this rank."""

    def __init__(self, case: Case, sets: Sets) -> None:
        self.case, self.row = case, case.row
        in_set = self.row.members is Members.HALF
        self.members = list(sets.mine.ranks) if in_set else list(range(SIZE))
        self.me = self.members.index(RANK)
        self.options = {"process_set": sets.mine} if in_set else {}
        # Every root sends every operand of a broadcast.
        roots = self.members if self.row.operation == "broadcast" else [None]
        self.operands = [(i, root) for root in roots for i in case.operands]
        self.array = functools.cache(self._array)
        self.want = functools.cache(self._want)

    def _array(self, operand, rank):
        """A rank's contribution."""
        shape = self.row.shapes[operand]
        if callable(shape):
            shape = shape(self.members.index(rank), len(self.members))
        return self.row.values(rank, shape, self.case.dtype_of(operand), operand)

    def _want(self, operand, root):
        """The result on this rank; of an exchange also how many rows came from each."""
        row, dtype, n = self.row, self.case.dtype_of(operand), len(self.members)
        if row.operation == "broadcast":
            return self.array(operand, root), None
        arrays = [self.array(operand, rank) for rank in self.members]
        if row.operation == "allgather":
            return np.concatenate(arrays), None
        if row.operation == "alltoall":
            splits = row.splits or (lambda r, n: [len(arrays[r]) // n] * n)
            return oracle.exchanged(arrays, [splits(r, n) for r in range(n)], self.me)
        op = (row.op or "Average").capitalize()
        whole = oracle.reduced(arrays, dtype, op, row.before, row.after)
        return (whole if row.operation == "allreduce" else oracle.share(whole, self.me, n)), None


class Run:
    """A case in one form: its operands, the call, and the comparison."""

    def __init__(self, adapter: Adapter, facts: Facts, form: Form) -> None:
        self.adapter, self.facts, self.form = adapter, facts, form
        self.case, self.row, self.operands = facts.case, facts.row, facts.operands
        is_shared = self.row.operation != "reducescatter" and self.row.members is Members.ALL
        self.is_the_same_everywhere = is_shared

    def make(self):
        """This rank's tensors."""
        make, case = self.adapter.make, self.case
        tensors = [make(self.facts.array(i, RANK), case.dtype_of(i)) for i, _ in self.operands]
        if self.row.layout:
            lay_out = self.adapter.layouts[self.row.layout]
            tensors = [lay_out(tensor) for tensor in tensors]
        self.before = [self.adapter.place(tensor) for tensor in tensors]
        return tensors

    def call(self, tensors):
        """A list of results for each type in which splits can be passed."""
        if self.row.splits is None:
            return [self._call(tensors, None)]
        splits = self.row.splits(self.facts.me, len(self.facts.members))
        return [self._call(tensors, make(splits)) for make in self.adapter.splits]

    def _call(self, tensors, splits):
        row, hvd = self.row, self.adapter.hvd
        function = self.adapter.function(self.form, row.operation)
        options = dict(self.facts.options)
        if row.op is not None:
            options["op"] = operator(hvd, row.op)
        if row.before != 1.0:
            options["prescale_factor"] = row.before
        if row.after != 1.0:
            options["postscale_factor"] = row.after
        if splits is not None:
            options["splits"] = splits
        if self.form.is_group:
            if row.names is not Names.NONE:
                options["name"] = f"{self.case.id}.{self.form.name}"
            results = function(tensors, **options)
            return self.adapter.synchronize(results) if self.form.is_async else results
        order = list(range(len(tensors)))
        if row.names is Names.DISTINCT and self.form.is_async and RANK % 2:
            order.reverse()
        results = {}
        for i in order:
            args = (
                [tensors[i]] if self.operands[i][1] is None else [tensors[i], self.operands[i][1]]
            )
            if row.names is Names.DISTINCT:
                options["name"] = f"{self.case.id}.{self.form.name}.{i}"
            elif row.names is Names.SAME:
                options["name"] = self.case.id
            results[i] = function(*args, **options)
            if self.form.is_async and row.names is Names.SAME:
                results[i] = self.adapter.synchronize(results[i])
        if self.form.is_async and row.names is not Names.SAME:
            for i in reversed(order):
                results[i] = self.adapter.synchronize(results[i])
        return [results[i] for i in range(len(tensors))]

    def check(self, tensors, results):
        """Compare everything, and that operands are as they have to be."""
        for answer in results:
            assert len(answer) == len(tensors)
            for tensor, (operand, root), place, result in zip(
                tensors, self.operands, self.before, answer, strict=True
            ):
                self._check(tensor, operand, root, place, result)

    def _check(self, tensor, operand, root, place, result):
        what = f"{self.case.id} {self.form.name} operand {operand}"
        read, dtype = self.adapter.read, self.case.dtype_of(operand)
        values, counts = self.facts.want(operand, root)
        if counts is not None and (self.row.splits or self.form.is_async):
            result, received = result
            oracle.same(read(received), (counts, "int32"), what=f"{what}: received splits")
        got = read(result)
        oracle.same(got, (values, dtype), self.case.tolerance, what)
        if self.form.is_in_place:
            assert result is tensor, f"{what}: the result is not the operand"
            assert self.adapter.place(tensor) == place, f"{what}: memory or layout changed"
        else:
            mine = self.facts.array(operand, RANK)
            oracle.same(read(tensor), (mine, dtype), what=f"{what}: the operand")
        if self.row.values in (oracle.normal, oracle.equal) and self.is_the_same_everywhere:
            bits = job.allgather_object(zlib.crc32(got[0].tobytes()))
            assert len(set(bits)) == 1, f"{what}: ranks have different bits"


class Conformance:
    """Tests of a subclass's adapters."""

    adapters: tuple = ()

    def pytest_generate_tests(self, metafunc):
        """The tests of all modes."""
        tests = []
        for adapter in self.adapters:
            prefix = f"{adapter.mode}-" if adapter.mode else ""
            if "cases" in metafunc.fixturenames:
                found = _packed(adapter, list(cases_of(adapter, SIZE)))
                tests += [pytest.param(adapter, cases, id=prefix + name) for name, cases in found]
            elif "mistake" in metafunc.fixturenames:
                found = mistakes_of(adapter, SIZE)
                tests += [
                    pytest.param(adapter, mistake, id=prefix + mistake.id) for mistake in found
                ]
        if tests:
            second = "cases" if "cases" in metafunc.fixturenames else "mistake"
            metafunc.parametrize(("adapter", second), tests)

    @pytest.fixture(scope="class")
    @classmethod
    def sets(cls):
        """A job with two sets; the usual one follows."""
        if job.is_initialized():
            job.barrier()
            job.shutdown()
        halves = [job.ProcessSet(range(start, SIZE, 2)) for start in (0, 1)] if SIZE > 1 else []
        job.init(process_sets=halves)
        if SIZE == 1:
            yield Sets(halves, job.global_process_set)
        else:
            yield Sets(halves, halves[RANK % 2], halves[1 - RANK % 2])
        job.barrier()
        job.shutdown()
        job.init()

    def test_results(self, adapter, cases, sets):
        runs = [
            Run(adapter, facts, form)
            for facts in [Facts(case, sets) for case in cases]
            for form in facts.row.forms
            if adapter.function(form, facts.row.operation)
        ]
        with adapter.around():
            tensors = [run.make() for run in runs]
            results = adapter.run(
                lambda tensors: [run.call(its) for run, its in zip(runs, tensors, strict=True)],
                tensors,
            )
            for run, its, answers in zip(runs, tensors, results, strict=True):
                run.check(its, answers)

    def test_without_a_job(self, sets):
        job.barrier()
        job.shutdown()
        try:
            for adapter in self.adapters:
                for operation in OPERATIONS:
                    for form in Form:
                        if adapter.has(operation) and adapter.function(form, operation):
                            _check_uninitialized(adapter, form, operation)
        finally:
            job.init(process_sets=sets.halves)
        for adapter in self.adapters:
            still_works(adapter)

    def test_mistake(self, adapter, mistake, sets):
        failures = []
        with adapter.around():
            for form in mistake.forms:
                if adapter.function(form, mistake.operation):
                    failures += _check_mistake(adapter, mistake, form, sets)
        for failure in failures:
            raise failure


def _packed(adapter, cases):
    if adapter.packing is Packing.ONE_CASE:
        return [(case.id, [case]) for case in cases]
    # A program names operations without a name by their place, so all members have to run the same program.
    programs = {}
    for case in cases:
        suffix = "" if case.row.members is Members.ALL else "-in_a_set"
        programs.setdefault(case.dtype + suffix, []).append(case)
    return list(programs.items())


def _check_mistake(adapter, mistake, form, sets):
    """Return the failures instead of raising them: this rank has to run the same operations as the others."""
    failures = []
    if mistake.concerns(RANK) or adapter.counts_mistakes:
        try:
            _make(adapter, mistake, form, sets)
        except (Exception, pytest.fail.Exception) as error:
            failures.append(error)
    still_works(adapter)
    return failures


def _make(adapter, mistake, form, sets):
    name = f"{mistake.id}.{form.name}"
    tensor, program = mistake.program(adapter, form, name, sets)
    before = adapter.read(tensor)
    with pytest.raises(adapter.fault(mistake.fault)) as raised:
        _read_all(adapter, adapter.run(program, [tensor]))
    for text in mistake.texts(name):
        assert re.search(text, str(raised.value)), (text, str(raised.value))
    oracle.same(adapter.read(tensor), before, what="the operand after the mistake")


def _check_uninitialized(adapter, form, operation):
    function = adapter.function(form, operation)
    positional = [0] if operation == "broadcast" else []

    def program(tensors):
        result = function(tensors if form.is_group else tensors[0], *positional)
        return adapter.synchronize(result) if form.is_async else result

    with (
        adapter.around(),
        pytest.raises(
            adapter.fault(Fault.NOT_INITIALIZED),
            match=r"has not been initialized; use hvd\.init\(\)",
        ),
    ):
        _read_all(adapter, adapter.run(program, [adapter.make(np.ones(2, "float32"), "float32")]))


def _read_all(adapter, results):
    """Read all results: where results come later, errors are raised here."""
    for result in results if isinstance(results, (list, tuple)) else [results]:
        if isinstance(result, (list, tuple)):
            _read_all(adapter, result)
        else:
            adapter.read(result)


def still_works(adapter):
    """An operation without a name works: the ranks still number such operations alike."""
    ones = np.ones(3, "float32")
    total = adapter.function(Form.NEW, "allreduce")(
        adapter.make(ones, "float32"), op=adapter.hvd.Sum
    )
    oracle.same(adapter.read(total), (ones * SIZE, "float32"), what="the operation after it")
