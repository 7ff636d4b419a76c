"""`horovod.tensorflow` inside of `jit_compile=True` with the core's handlers for CUDA; TensorFlow runs on the CPU.

The handlers of `xla_on_double` stand for its platform CUDA.
"""

import re

import numpy as np
import pytest
from devices import IS_REAL, number_of_gpus

# Before TensorFlow is in the process, where PyTorch's own tests do not run.
if IS_REAL:
    pytest.skip("these handlers are for the double", allow_module_level=True)

import tensorflow as tf
import xla_on_double

from horovod.common import api as hvd
from horovod.tensorflow import _xla, mpi_ops

hvd.init()
SIZE, RANK = hvd.size(), hvd.rank()
DEVICE = hvd.local_rank() % number_of_gpus()
several = pytest.mark.skipif(SIZE == 1, reason="needs two ranks")

for _kind in _xla._KINDS:
    _name = f"horovod_xla_{_kind}"
    assert _xla._register_one(_name, b"Host", xla_on_double.handler(_name, DEVICE)) is None
_xla._register = lambda: None


@pytest.fixture(autouse=True)
def _through_the_handlers_for_gpus():
    with xla_on_double.some_calls():
        yield


def compiled(function):
    return tf.function(function, jit_compile=True)


def test_operations():
    @compiled
    def program(x):
        return (
            mpi_ops._allreduce(x, op=hvd.Sum),
            mpi_ops.broadcast(x, SIZE - 1),
            mpi_ops.allgather(x),
            mpi_ops._reducescatter(x, op=hvd.Sum),
            mpi_ops._grouped_allreduce([x, tf.cast(x, tf.int32)], op=hvd.Max),
        )

    everyones = [np.arange(2.0 * SIZE, dtype=np.float32) + rank for rank in range(SIZE)]
    total, sent, gathered, scattered, largest = program(everyones[RANK])
    assert np.array_equal(total, np.sum(everyones, 0))
    assert np.array_equal(sent, everyones[-1])
    assert np.array_equal(gathered, np.concatenate(everyones))
    assert np.array_equal(scattered, np.split(np.sum(everyones, 0), SIZE)[RANK])
    assert np.array_equal(largest[0], everyones[-1])
    assert np.array_equal(largest[1], everyones[-1])


def test_gradients():
    @compiled
    def slope(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = (RANK + 1.0) * tf.reduce_sum(mpi_ops._allreduce(x, op=hvd.Sum))
        return tape.gradient(value, x)

    assert np.allclose(slope(tf.ones(3)), np.full(3, SIZE * (SIZE + 1) / 2))


def test_a_function_that_is_called_at_several_places():
    """Where it is called is a number that the core reads from the GPU's memory."""
    inner = tf.function(lambda x: mpi_ops._allreduce(x, op=hvd.Sum))
    program = compiled(lambda x: (inner(x), inner(10.0 * x)))
    one, ten = program(tf.fill([4], RANK + 1.0))
    assert np.allclose(one, np.full(4, SIZE * (SIZE + 1) / 2))
    assert np.allclose(ten, np.full(4, 10 * SIZE * (SIZE + 1) / 2))


def test_each_call_comes_after_the_one_before():
    """Whatever XLA would do first: it decides that by what it has measured in its process."""

    @compiled
    def program(x, y):
        pair = mpi_ops._grouped_allreduce([y, x], op=hvd.Sum)
        loss = mpi_ops._allreduce(x * 2.0, op=hvd.Sum)
        return pair, mpi_ops._allreduce(loss), mpi_ops.allgather(y)

    x, y = tf.ones(()), tf.ones((3, 2))
    graph = program.get_concrete_function(x, y).graph
    first, *others = [op for op in graph.get_operations() if op.type == "XlaCallModule"]
    assert b"after" not in first.get_attr("module")
    assert all(b"after = 1" in op.get_attr("module") for op in others)
    # Of several results the smallest, which keeps the least memory.
    before = [first.outputs[1], others[0].outputs[0], others[1].outputs[0]]
    assert [op.inputs[-1].name for op in others] == [tensor.name for tensor in before]
    pair, loss, gathered = program(x, y)
    assert np.array_equal(pair[0], np.full((3, 2), SIZE))
    assert loss == 2 * SIZE * SIZE
    assert gathered.shape == (3 * SIZE, 2)


def total(x):
    return mpi_ops._allreduce(x, op=hvd.Sum)


def called(x):
    inner = tf.function(total)
    return total(3.0 * x), inner(x) + inner(2.0 * x), total(x)


def branched(x):
    return total(3.0 * x), tf.cond(x[0] > 0, lambda: total(2.0 * x), lambda: x), total(x)


def branches(x):
    chosen = tf.switch_case(tf.cast(x[0], tf.int32), [lambda: x, lambda: total(total(x))])
    return total(3.0 * x), chosen, total(x)


def looped(x):
    _, end = tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, total(y)), (0, x))
    return total(3.0 * x), end, total(x)


def looped_in_a_branch_of_a_function(x):
    inner = tf.function(lambda x: tf.cond(x[0] > 0, lambda: looped(x)[1], lambda: x))
    return total(3.0 * x), inner(x), total(x)


def differentiated(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        value = tf.reduce_sum(tf.cond(x[0] > 0, lambda: total(x**2), lambda: x) ** 2)
    return total(3.0 * x), tape.gradient(value, x), total(x)


variable = tf.Variable(tf.zeros(3))


def assigned(x):
    variable.assign(x)

    def step():
        variable.assign_add(total(2.0 * x))
        return 0

    tf.cond(x[0] > 0, step, lambda: 0)
    return total(3.0 * x), variable.read_value(), total(x)


def test_tensors_without_elements_before_a_function():
    inner = tf.function(total)
    program = compiled(lambda x: (total(x[:0]), inner(x)))
    empty, result = program(tf.ones(3))
    assert empty.shape == (0,)
    assert np.allclose(result, np.full(3, SIZE))


class Hlo:
    """A program's instructions, by the computations that they are in."""

    def __init__(self, text):
        self.computations = {}
        for line in text.splitlines():
            if head := re.match(r"(ENTRY )?%([\w.-]+) .*{$", line):
                its = self.computations[head[2]] = {}
                self.entry = head[2] if head[1] else getattr(self, "entry", None)
            elif line.startswith("  "):
                its[re.match(r"\s*(?:ROOT )?%([\w.-]+)", line)[1]] = line.partition(" = ")[2]

    def has_calls(self, instruction):
        """Whether it is a call of Horovod, or one is in what it runs."""
        names = re.findall(r"%([\w.-]+)", instruction)
        inner = [self.computations[name] for name in names if name in self.computations]
        return "horovod_xla_" in instruction or any(
            self.has_calls(its) for all_of_one in inner for its in all_of_one.values()
        )

    def are_in_order(self, computation):
        """Whether each call in a computation needs one before it, and how many there are."""
        its = self.computations[computation]
        needs = {}
        last, count = None, 0
        for name, instruction in its.items():
            taken = [other for other in re.findall(r"%([\w.-]+)", instruction) if other in its]
            needs[name] = {name}.union(*(needs[other] for other in taken))
            if self.has_calls(instruction):
                if last is not None and last not in needs[name]:
                    return False, count
                last, count = name, count + 1
        return True, count


@pytest.mark.parametrize(
    ("program", "factor"),
    [
        (called, 3 * SIZE),
        (branched, 2 * SIZE),
        (branches, SIZE**2),
        (looped, SIZE**3),
        (looped_in_a_branch_of_a_function, SIZE**3),
        (differentiated, 4 * SIZE**2),
        (assigned, 1 + 2 * SIZE),
    ],
)
def test_the_order_holds_across_functions_inside_a_program(program, factor):
    """As XLA has made it: in order by the text, each call with the one before it among what it needs."""
    x = tf.ones(3)
    program = compiled(program)
    hlo = Hlo(program.experimental_get_compiler_ir(x)(stage="optimized_hlo"))
    found = {name: hlo.are_in_order(name) for name in hlo.computations}
    assert all(in_order for in_order, _ in found.values()), found
    assert found[hlo.entry][1] >= 3
    for got, want in zip(program(x), (3 * SIZE, factor, SIZE), strict=True):
        assert np.allclose(got, np.full(3, want))


@several
def test_ranks_that_disagree():
    program = compiled(lambda x: mpi_ops._allreduce(x, op=hvd.Sum, name="shapes"))
    with pytest.raises(tf.errors.OpError, match="Mismatched"):
        program(tf.ones(RANK + 1))
    after = compiled(lambda x: mpi_ops._allreduce(x, op=hvd.Sum, name="after"))
    assert np.allclose(after(tf.ones(2)), np.full(2, SIZE))
