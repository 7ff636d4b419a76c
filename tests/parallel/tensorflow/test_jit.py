"""`horovod.tensorflow` inside `tf.function(jit_compile=True)`: gradients, names, what is refused."""

import ctypes
import functools
import re

import numpy as np
import pytest
import tensorflow as tf

from horovod import _core
from horovod.common import api as hvd
from horovod.tensorflow import _xla, mpi_ops

hvd.init()
SIZE, RANK = hvd.size(), hvd.rank()


def compiled(function):
    return tf.function(function, jit_compile=True)


def equal(tensor, array):
    assert np.array_equal(tensor.numpy(), array)


def test_numbers_of_ranks():
    @compiled
    def program():
        assert _xla.is_compiling()
        return mpi_ops.rank_op(), mpi_ops.size_op(), mpi_ops.process_set_included_op()

    assert [int(x) for x in program()] == [RANK, SIZE, 1]


GRADIENTS = {
    "allreduce": lambda x: mpi_ops._allreduce(x, op=hvd.Sum, prescale_factor=2.0),
    "grouped_allreduce": lambda x: tf.concat(
        mpi_ops._grouped_allreduce([x, 3 * x], op=hvd.Average), 0
    ),
    "allgather": mpi_ops.allgather,
    "grouped_allgather": lambda x: tf.concat(mpi_ops.grouped_allgather([x, 2 * x]), 0),
    "broadcast": lambda x: mpi_ops.broadcast(x, SIZE - 1),
    "reducescatter": lambda x: mpi_ops._reducescatter(x, op=hvd.Sum, postscale_factor=0.5),
    "grouped_reducescatter": lambda x: tf.concat(
        mpi_ops._grouped_reducescatter([x, x], op=hvd.Average), 0
    ),
}


@pytest.mark.parametrize("kind", GRADIENTS)
def test_gradients_are_those_of_the_custom_operations(kind):
    def slope(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(GRADIENTS[kind](x) ** 2) * (RANK + 1.0)
        return tape.gradient(loss, x)

    x = tf.reshape(tf.range(2.0 * SIZE), (SIZE, 2)) + RANK
    assert np.allclose(compiled(slope)(x), tf.function(slope)(x))


def test_nested_functions_loops_and_names():
    @tf.function
    def inner(x):
        return mpi_ops._allreduce(x, op=hvd.Sum)

    @compiled
    def outer(x):
        x = inner(x)
        for _ in tf.range(3):
            x = mpi_ops._allreduce(x, op=hvd.Average)
        return x

    assert np.allclose(outer(tf.ones(4)), SIZE)
    if RANK == 0:  # nothing is sent: this is a trace only
        outer.get_concrete_function(tf.TensorSpec((5,)))
    assert np.allclose(outer(tf.ones(6)), SIZE), "a rank that traces once more has the same names"


def test_a_function_that_is_used_at_several_places_keeps_their_values_apart():
    @tf.function
    def inner(x):
        return mpi_ops._allreduce(x, op=hvd.Sum)

    @tf.function
    def twice(x):
        return inner(x) + inner(x + 1), inner(-x)

    def late(x, rounds):
        """The same value, later: XLA runs what is ready, so ranks that run one program have other orders."""
        m = tf.tile(x[:1, None], [256, 256])
        for _ in tf.range(rounds):
            m = tf.linalg.matmul(m, m) * 1e-6
        return x + 0 * m[0, 0]

    @compiled
    def outer(x, y, z, rounds):
        xs = [late(v, rounds[i]) for i, v in enumerate((x, y, z))]
        a, b, c = (inner(x) for x in xs)
        if x[0] > 0:
            c = c + inner(xs[2] * 10)
        for _ in tf.range(2):
            c = inner(c / SIZE)
        return a, b, c, twice(a), twice(b)

    x, y, z = tf.ones(4), tf.fill([4], 10.0), tf.fill([4], 100.0)
    rounds = tf.constant([50 * int(i == RANK) for i in range(3)])
    for _ in range(3):  # the first run traces, the others find it traced
        a, b, c, ofa, ofb = tf.nest.map_structure(lambda t: t.numpy()[0], outer(x, y, z, rounds))
        assert (a, b, c) == (SIZE, 10 * SIZE, 1100 * SIZE)
        assert ofa == (SIZE * (2 * a + 1), -SIZE * a)
        assert ofb == (SIZE * (2 * b + 1), -SIZE * b)
        # In another program the numbers of the places are others.
        assert compiled(lambda x: (inner(x), inner(2 * x)))(x)[1].numpy()[0] == 2 * SIZE
    assert inner(x).numpy()[0] == SIZE, "what was traced for a program works outside of it"


def test_a_program_that_is_also_part_of_another_one():
    part = compiled(lambda x: mpi_ops._allreduce(x, op=hvd.Sum))
    assert part(tf.ones(2)).numpy()[0] == SIZE
    whole = compiled(lambda x: (part(x), part(3 * x)))
    assert [t.numpy()[0] for t in whole(tf.ones(2))] == [SIZE, 3 * SIZE]


@pytest.mark.parametrize("kind", GRADIENTS)
def test_gradients_of_functions_inside_the_program(kind):
    def of(inner):
        def slopes(x, y):
            with tf.GradientTape() as tape:
                tape.watch([x, y])
                loss = tf.reduce_sum(inner(x) ** 2) + 3 * tf.reduce_sum(inner(y) ** 2)
            return tape.gradient(loss, [x, y])

        return slopes

    x = tf.reshape(tf.range(2.0 * SIZE), (SIZE, 2)) + RANK
    expected = tf.function(of(GRADIENTS[kind]))(x, x + 5)
    got = compiled(of(tf.function(GRADIENTS[kind])))(x, x + 5)
    assert np.allclose(got, expected)


def test_a_gradient_that_is_taken_twice_is_refused():
    """It is a function at two places, and TensorFlow does not tell of which call."""

    def slopes(x):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = inner(x)
            first, second = tf.reduce_sum(y**2), tf.reduce_sum(y)
        return tape.gradient(first, x), tape.gradient(second, x)

    def average(x):
        return mpi_ops._allreduce(x, op=hvd.Average)

    inner = tf.function(average)
    with pytest.raises(NotImplementedError, match="plain Python function"):
        compiled(slopes)(tf.ones(2))
    inner = average
    assert np.allclose(compiled(slopes)(tf.ones(2)), [[2, 2], [1, 1]])


def test_operations_in_the_gradient_of_an_inner_function_are_refused():
    @tf.custom_gradient
    def backwards(x):
        return tf.identity(x), lambda g: mpi_ops._allreduce(g, op=hvd.Average)

    def slope(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(inner(x))
        return tape.gradient(y, x)

    inner = tf.function(lambda x: backwards(x))
    with pytest.raises(NotImplementedError, match="plain Python function"):
        compiled(slope)(tf.ones(2))
    inner = backwards
    assert np.allclose(compiled(slope)(tf.ones(2)), 1)


def test_training_with_variables():
    weights = tf.Variable(tf.zeros(3))

    @compiled
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((weights - x) ** 2)
        gradient = mpi_ops._allreduce(tape.gradient(loss, weights), op=hvd.Average)
        weights.assign_sub(0.5 * gradient)
        return loss

    step(tf.fill([3], float(RANK)))
    assert np.allclose(weights, (SIZE - 1) / 2)


def test_calls_keep_the_order_of_the_script_whatever_else_a_rank_computes():
    """XLA runs short programs' parts one after the other: ranks with another order would wait for each other."""
    loss, weights = tf.Variable(RANK + 1.0), tf.Variable(tf.ones(3))

    def step(is_first):
        reduced = mpi_ops._allreduce(loss + 0, op=hvd.Average, name="loss")
        moved = mpi_ops._allreduce(tf.sin(weights), op=hvd.Average, name="weights")
        also = [loss + 1] if is_first else []
        loss.assign(reduced)
        weights.assign(moved)
        return [reduced, moved, *also]

    first, other = (compiled(functools.partial(step, is_first)) for is_first in (True, False))
    for function in (first, other):
        text = function.experimental_get_compiler_ir()(stage="optimized_hlo")
        names = re.findall(r'name = "(?:\w+/)*(\w+)"', text)
        assert names == ["loss", "weights"]
    (first if RANK == 0 else other)()
    assert loss.numpy() == (SIZE + 1) / 2
    assert np.allclose(weights, np.sin(np.ones(3)))


def test_what_cannot_be_compiled_is_told_with_the_remedy():
    unknown = tf.function(
        mpi_ops._allreduce, jit_compile=True, input_signature=[tf.TensorSpec((None, 2))]
    )
    with pytest.raises(ValueError, match="drop_remainder=True"):
        unknown(tf.ones((2, 2)))
    with pytest.raises(NotImplementedError, match="jit_compile=False"):
        compiled(mpi_ops.alltoall)(tf.ones(SIZE))
    with pytest.raises(NotImplementedError, match="outside of the function"):
        compiled(mpi_ops.join)()
    with pytest.raises(TypeError, match="dtype complex64"):
        compiled(mpi_ops.allgather)(tf.ones(2, tf.complex64))
    if SIZE > 1:
        with pytest.raises(ValueError, match="pad it to a multiple"):
            compiled(mpi_ops._reducescatter)(tf.ones(SIZE + 1))
        with pytest.raises(tf.errors.InvalidArgumentError, match="equally many rows"):
            compiled(mpi_ops.allgather)(tf.ones(RANK + 1))
        with pytest.raises(tf.errors.FailedPreconditionError, match="Mismatched"):
            compiled(lambda x: mpi_ops._allreduce(x, name="same"))(tf.ones(RANK + 1))


def test_a_function_that_was_traced_outside_and_is_used_inside_names_its_operation():
    @tf.function
    def inner(x):
        return mpi_ops._allreduce(x)

    inner(tf.ones(2))
    # TensorFlow's own words: nothing of ours is asked.
    with pytest.raises(tf.errors.InvalidArgumentError, match="HorovodAllreduce"):
        compiled(inner.get_concrete_function(tf.TensorSpec((2,))))(tf.ones(2))


def test_outside_of_compiled_functions_custom_operations_are_used():
    def f(x):
        assert not _xla.is_compiling()
        return mpi_ops._allreduce(x, op=hvd.Sum)

    assert np.allclose(f(tf.ones(2)), SIZE)
    assert np.allclose(tf.function(f)(tf.ones(2)), SIZE)


def test_functions_for_gpus_are_registered_beside_those_for_the_cpu():
    """TensorFlow takes that of the platform which it compiles for."""
    program = compiled(lambda x: mpi_ops._allreduce(x, op=hvd.Sum, name="registers"))
    equal(program(tf.ones(2)), np.full(2, SIZE))
    another = ctypes.CDLL(_core.__file__).horovod_xla_elsewhere
    for platform, _ in _xla._PLATFORMS.values():
        for kind in _xla._KINDS:
            refused = _xla._register_one(f"horovod_xla_{kind}", platform, another)
            assert b"registration" in (refused or b""), refused
    assert _xla._register_one("horovod_xla_unheard_of", b"CUDA", another) is None


def test_versions_of_xla_find_what_is_registered_in_their_places(monkeypatch):
    """Version 0.4 has one function more, before the traits."""
    seen = []

    def register(address):
        seen.append(list((ctypes.c_uint64 * 12).from_address(address)))

    monkeypatch.setattr(_xla, "_xla_functions", lambda: lambda _: register)
    handler = ctypes.CDLL(_core.__file__).horovod_xla_allreduce
    assert _xla._register_one("some", b"Host", handler) is None
    ((size, _, _, _, _, _, *before, execute, record, traits),) = seen
    assert size >= 11 * 8 + 4, "version 0.4 refuses what is shorter"
    assert execute == ctypes.cast(handler, ctypes.c_void_p).value
    # In the versions before it the traits are where the function is now.
    assert [*before, record, traits & 0xFFFFFFFF] == [0] * 5
    assert ctypes.sizeof(_xla._Message) >= 36, "version 0.4 writes a code behind the text"
