"""`horovod.jax` inside of JAX's transformations: gradients, scans, batches, names, donated memory, large programs."""

import ctypes
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxlib import xla_client

import horovod.jax as hvd
from horovod import _core
from horovod.jax import _names

hvd.init()
SIZE, RANK = hvd.size(), hvd.rank()
SUM_OF_RANKS = SIZE * (SIZE - 1) / 2
WAYS = [jax.grad, lambda f: jax.jit(jax.grad(f)), lambda f: jax.grad(jax.jit(f))]


@pytest.mark.parametrize("gradient", WAYS)
def test_gradients(gradient):
    x = jnp.arange(1.0, 2 * SIZE + 1)
    weights = jnp.float32(RANK + 1)
    total = np.float32(sum(range(1, SIZE + 1)))
    # Each rank's loss is the weighted sum of the result.
    got = gradient(lambda x: (weights * hvd.allreduce(x, op=hvd.Sum)).sum())(x)
    assert np.allclose(got, np.full_like(x, total))
    got = gradient(lambda x: (weights * hvd.allreduce(x, prescale_factor=2.0)).sum())(x)
    assert np.allclose(got, np.full_like(x, 2 * total / SIZE))
    got = gradient(lambda x: (weights * hvd.broadcast(x, SIZE - 1)).sum())(x)
    assert np.allclose(got, np.full_like(x, total / SIZE if RANK == SIZE - 1 else 0))
    got = gradient(lambda x: (weights * hvd.allgather(x)).sum())(x)
    assert np.allclose(got, np.full_like(x, total / SIZE))
    got = gradient(lambda x: (weights * hvd.reducescatter(x, op=hvd.Sum)).sum())(x)
    assert np.allclose(got, SIZE * np.repeat(np.arange(1, SIZE + 1), 2))
    got = gradient(lambda x: (weights * hvd.alltoall(x)).sum())(x)
    assert np.allclose(got, np.repeat(np.arange(1, SIZE + 1), 2))


def test_gradients_of_groups_with_integers():
    def loss(x, n):
        a, b, c = hvd.grouped_allreduce([x, n, 2 * x], op=hvd.Sum)
        return (a * b).sum() + c.sum()

    got = jax.jit(jax.grad(loss))(jnp.ones(2), jnp.int32(3))
    assert np.allclose(got, SIZE * (3 * SIZE + 2))


def test_gradients_of_uneven_rows():
    got = jax.grad(lambda x: (hvd.allgather(x) ** 2).sum())(jnp.full((RANK + 1, 2), RANK + 1.0))
    assert np.allclose(got, np.full((RANK + 1, 2), 2 * (RANK + 1.0)))


def test_second_derivatives():
    def slope(x):
        return jax.grad(lambda x: (hvd.allreduce(x, op=hvd.Sum) ** 3).sum())(x).sum()

    total = SIZE * 2.0
    # 3 t^2 summed over ranks, and once more.
    assert np.allclose(jax.jit(jax.grad(slope))(jnp.full(2, 2.0)), 6 * total * SIZE * SIZE)


def test_scans_and_branches_and_loops():
    def body(carry, x):
        return carry + hvd.allreduce(x, op=hvd.Sum), hvd.allreduce(carry)

    final, seen = jax.jit(lambda xs: jax.lax.scan(body, jnp.zeros(2), xs))(jnp.ones((3, 2)))
    assert np.array_equal(final, np.full(2, 3.0 * SIZE))
    assert np.array_equal(seen[:, 0], SIZE * np.arange(3.0))
    slope = jax.jit(jax.grad(lambda xs: jax.lax.scan(body, jnp.zeros(2), xs)[0].sum()))
    assert np.allclose(slope(jnp.ones((3, 2))), SIZE)
    branch = jax.jit(lambda n, x: jax.lax.cond(n > 0, hvd.allreduce, lambda x: 2 * x, x))
    assert branch(1, jnp.float32(RANK)) == (SIZE - 1) / 2
    assert branch(0, jnp.float32(1)) == 2
    loop = jax.jit(lambda x: jax.lax.fori_loop(0, 4, lambda _, x: hvd.allreduce(x), x))
    assert np.allclose(loop(jnp.float32(RANK)), (SIZE - 1) / 2)


def test_batches():
    x = jnp.arange(6.0).reshape(3, 2) + RANK
    for way in (lambda f: f, jax.jit):
        assert np.allclose(way(jax.vmap(hvd.allreduce))(x), x - RANK + (SIZE - 1) / 2)
        assert np.allclose(way(jax.vmap(lambda x: hvd.broadcast(x, 0)))(x), x - RANK)
        gathered = way(jax.vmap(hvd.allgather))(x)
        assert gathered.shape == (3, 2 * SIZE)
        assert np.allclose(gathered[:, :2], x - RANK)
    slopes = jax.jit(jax.vmap(jax.grad(lambda x: (hvd.allreduce(x, op=hvd.Sum) ** 2).sum())))(x)
    assert slopes.shape == x.shape
    by_column = jax.jit(jax.vmap(hvd.allreduce, in_axes=1, out_axes=1))(x)
    assert np.allclose(by_column, x - RANK + (SIZE - 1) / 2)


def test_checkpointed_functions():
    @jax.checkpoint
    def layer(x):
        return jnp.sin(hvd.allreduce(x, op=hvd.Sum))

    x = jnp.ones(3)
    got = jax.jit(jax.grad(lambda x: layer(layer(x)).sum()))(x)
    direct = jax.jit(jax.grad(lambda x: jnp.sin(SIZE * jnp.sin(SIZE * x)).sum()))(x)
    assert np.allclose(got, direct, atol=1e-5)


def test_calls_of_one_name_at_several_places_keep_their_values(monkeypatch):
    """A function that is traced once has one name wherever it is used; the order of the calls is the script's."""

    def total(x):
        return hvd.allreduce(x, op=hvd.Sum)

    x = jnp.full(3, RANK + 1.0)
    everyones = SIZE * (SIZE + 1) / 2
    inner = jax.jit(total)

    def body(x, _):
        return hvd.allreduce(x), None

    def scanned(x):
        return jax.lax.scan(body, x, None, length=3)[0]

    def given(x):
        return hvd.allreduce(x, op=hvd.Sum, name="given twice")

    monkeypatch.setenv("HOROVOD_JAX_ORDERED_CALLS", "1")
    for function, factor in ((total, 1), (inner, 1), (scanned, 1 / SIZE), (given, 1)):
        one, ten = jax.jit(lambda x, f=function: (f(x), f(10 * x)))(x)
        assert np.allclose(one, factor * everyones)
        assert np.allclose(ten, 10 * factor * everyones)

    power = jax.custom_vjp(lambda x: x**2)
    power.defvjp(lambda x: (total(x), x), lambda x, g: (2 * x * total(g),))

    def loss(x):
        return jax.lax.scan(lambda c, _: (power(c) + 10 * power(3 * c), 0), x, length=1)[0].sum()

    value, slope = jax.jit(jax.value_and_grad(loss))(x)
    assert np.allclose(value, 3 * 31 * everyones)
    assert np.allclose(slope, 2 * x * SIZE * (1 + 90))


def refused(program, *args):
    match = "several places of one compiled program"
    with pytest.raises((RuntimeError, ValueError), match=match):
        jax.block_until_ready(jax.jit(program)(*args))


def test_a_function_that_is_traced_once_and_used_twice_is_refused():
    """XLA could run the two in another order on each rank, and their values would be mixed up."""

    def total(x):
        return hvd.allreduce(x, op=hvd.Sum)

    x, inner = jnp.ones(3), jax.jit(total)
    assert np.allclose(jax.jit(lambda x: inner(x) + 1)(x), SIZE + 1)
    refused(lambda x: inner(x) + inner(x * 2), x)

    def body(x, _):
        return hvd.allreduce(x), None

    def scanned(x):
        return jax.lax.scan(body, x, None, length=3)[0]

    assert np.allclose(jax.jit(scanned)(x), 1)
    refused(lambda x: scanned(x) + scanned(x * 2), x)

    power = jax.custom_vjp(lambda x: x**2)
    power.defvjp(lambda x: (total(x), x), lambda x, g: (2 * x * total(g),))

    def loss(x):
        return jax.lax.scan(lambda c, _: (power(c) + power(3 * c), 0), x, length=1)[0].sum()

    refused(jax.value_and_grad(loss), x)


def test_a_function_that_was_called_alone_is_refused_at_several_places(monkeypatch):
    """JAX keeps what it has traced, in which nothing orders it among other calls."""
    monkeypatch.setenv("HOROVOD_JAX_ORDERED_CALLS", "1")

    def total(x):
        return hvd.allreduce(x, op=hvd.Sum)

    alone, x = jax.jit(total), jnp.ones(3)
    assert np.allclose(alone(x), SIZE)
    assert np.allclose(jax.jit(lambda x: alone(x) * 2)(x), 2 * SIZE)
    refused(lambda x: alone(x) + alone(x * 2), x)
    refused(lambda x: alone(x) + total(x * 2), x)
    refused(lambda x: total(x) + alone(x * 2), x)


@pytest.mark.parametrize("shared_out", ["by the function", "by XLA"])
def test_programs_for_several_devices_of_a_rank_are_refused(shared_out):
    """Each device would make the call: the first of this rank could get what the second of another one has."""
    mesh = jax.sharding.AbstractMesh((2,), ("device",))
    spec = jax.sharding.PartitionSpec("device")
    program = hvd.allreduce
    if shared_out == "by the function":
        program = jax.shard_map(program, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    operand = jax.ShapeDtypeStruct((2,), jnp.float32, sharding=jax.NamedSharding(mesh, spec))
    traced = jax.jit(program).trace(operand)
    with pytest.raises(ValueError, match="allreduce in a program for 2 devices of one rank"):
        traced.lower(lowering_platforms=("cpu",))


def test_a_setting_that_says_neither_yes_nor_no_is_told(monkeypatch):
    monkeypatch.setenv("HOROVOD_JAX_ORDERED_CALLS", "perhaps")
    program = jax.jit(lambda x: jax.lax.scan(lambda c, _: (hvd.allreduce(c), 0), x, length=2)[0])
    with pytest.raises(ValueError, match="HOROVOD_JAX_ORDERED_CALLS"):
        program(jnp.ones(3))


def test_donated_operands_are_worked_on_in_place():
    step = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum), donate_argnums=0)
    x = jnp.ones((512, 512)) + 0
    before = x.unsafe_buffer_pointer()
    y = step(x)
    assert y.unsafe_buffer_pointer() == before
    assert np.array_equal(y, np.full((512, 512), SIZE))


def test_a_donated_operand_that_others_read_keeps_its_value_for_them():
    """XLA copies it, however many operations work in place, on it and on views of it."""

    def several_readers(x):
        turned = x.reshape(256, 1024)
        total = hvd.allreduce(x, op=hvd.Sum)
        return total, hvd.allreduce(turned, op=hvd.Sum), hvd.allreduce(x, op=hvd.Max), x.T + total

    program = jax.jit(several_readers, donate_argnums=0)
    for step in range(3):
        mine = jnp.arange(512.0 * 512).reshape(512, 512) % 97 * (RANK + 1) + step
        want = np.asarray(mine) * 1
        everyones = [np.arange(512.0 * 512) % 97 * (rank + 1) + step for rank in range(SIZE)]
        total, turned, largest, last = (np.asarray(y) for y in program(mine))
        assert np.array_equal(total.ravel(), np.sum(everyones, 0))
        assert np.array_equal(turned.ravel(), np.sum(everyones, 0))
        assert np.array_equal(largest.ravel(), np.max(everyones, 0))
        assert np.array_equal(last, want.T + total)


def _compiled_collectives(f, *args, donated=()):
    """Of each collective in the compiled program: whether it may work in place. And how many copies XLA makes."""
    program = jax.jit(f, donate_argnums=donated).lower(*args).compile().as_text()
    calls = [line for line in program.splitlines() if "horovod_xla_" in line]
    return ["output_to_operand_aliasing" in line for line in calls], program.count(" copy(")


def test_arguments_that_are_not_donated_are_read_where_they_are():
    x = jnp.ones((64, 64))

    def reduced(x):
        return hvd.allreduce(x, op=hvd.Sum)

    assert _compiled_collectives(reduced, x) == ([False], 0)
    assert _compiled_collectives(lambda x: hvd.broadcast(x, 0), x) == ([False], 0)
    assert _compiled_collectives(reduced, x, donated=0) == ([True], 0)
    assert _compiled_collectives(lambda x: reduced(x @ x), x) == ([True], 0)
    # One operation on several operands: each is taken for itself.
    both = jax.jit(lambda x, y: hvd.grouped_allreduce([x, y, x @ y]), donate_argnums=1)
    lowered = both.lower(x, x).as_text()
    aliases = [lowered.count(f"operand_index = {i}") for i in range(3)]
    assert aliases == [0, 1, 1]


def test_arguments_that_are_not_donated_keep_their_values():
    total = np.float32(SIZE * (SIZE + 1) / 2)
    mine = np.float32(RANK + 1)
    x = jnp.full((512, 512), mine)
    before = x.unsafe_buffer_pointer()

    def around(x, y):
        # The argument itself, before and after it is reduced, through another function, in a batch and in a loop.
        first = hvd.allreduce(x, op=hvd.Sum)
        second = hvd.allreduce(x, op=hvd.Max)
        inner = jax.jit(lambda z: hvd.allreduce(z, op=hvd.Sum))(x)
        batch = jax.vmap(lambda z: hvd.allreduce(z, op=hvd.Sum))(x)
        given = hvd.broadcast(x, SIZE - 1)
        total, _ = jax.lax.scan(lambda c, _: (hvd.allreduce(c, op=hvd.Sum), None), x, None, 1)
        return (
            first,
            second,
            inner,
            batch,
            given,
            total,
            x + first,
            y + hvd.allreduce(y, op=hvd.Sum),
        )

    program = jax.jit(around, donate_argnums=1)
    for _ in range(3):
        y = jnp.full((512, 512), 2 * mine)
        results = program(x, y)
        expected = [total, SIZE, total, total, SIZE, total, mine + total, 2 * mine + 2 * total]
        for result, value in zip(results, expected, strict=True):
            assert np.array_equal(result, np.full((512, 512), value))
        assert x.unsafe_buffer_pointer() == before
        assert np.array_equal(x, np.full((512, 512), mine)), "an argument was changed"
    # The same array as two arguments.
    twice = jax.jit(lambda x, y: (hvd.allreduce(x, op=hvd.Sum), hvd.allreduce(y, op=hvd.Sum)))
    for result in twice(x, x):
        assert np.array_equal(result, np.full((512, 512), total))
    slope = jax.jit(jax.grad(lambda x: (x * hvd.allreduce(x, op=hvd.Sum)).sum()))
    assert np.array_equal(slope(x), np.full((512, 512), 2 * total))
    assert np.array_equal(x, np.full((512, 512), mine)), "an argument was changed"


def test_many_operations_in_a_program_whose_parts_run_at_the_same_time():
    # Large buffers: XLA begins what is independent on all its threads.
    def many(xs):
        return [hvd.allreduce(x @ x, op=hvd.Sum) for x in xs]

    xs = [jnp.full((128, 128), i + 1.0) for i in range(12)]
    compiled = jax.jit(many)
    for _ in range(3):
        for i, result in enumerate(compiled(xs)):
            assert np.array_equal(result, np.full((128, 128), SIZE * 128 * (i + 1.0) ** 2))


def test_calls_keep_the_order_of_the_script_whatever_else_a_rank_computes():
    """XLA runs short programs' parts one after the other: ranks with another order would wait for each other."""

    def program(loss, w, is_first):
        reduced = [hvd.allreduce(loss, name="loss"), hvd.allreduce(jnp.sin(w), name="weights")]
        return [*reduced, jnp.mean(loss * 2)] if is_first else reduced

    def order(is_first):
        compiled = jax.jit(program, donate_argnums=0, static_argnums=2)
        text = compiled.lower(jnp.ones(()), jnp.ones(3), is_first).compile().as_text()
        return re.findall(r'name = "(\w+)"', text)

    assert order(True) == order(False) == ["loss", "weights"]
    mine = jax.jit(program, donate_argnums=0, static_argnums=2)
    loss, weights, *_ = mine(jnp.full((), RANK + 1.0), jnp.ones(3), RANK == 0)
    assert loss == (SIZE + 1) / 2
    assert np.allclose(weights, np.sin(np.ones(3)))


def test_programs_that_are_started_one_after_the_other_without_waiting():
    square = jax.jit(lambda x: hvd.allreduce(x @ x, op=hvd.Sum))
    results = [square(jnp.full((256, 256), i + 1.0)) for i in range(20)]
    assert [float(r[0, 0]) for r in results] == [SIZE * 256 * (i + 1.0) ** 2 for i in range(20)]


def test_a_rank_that_traces_more_often_has_the_same_names():
    @jax.jit
    def mean(x):
        return hvd.allreduce(x)

    if RANK == 0:  # nothing is sent: this is a trace only
        for n in range(2, 6):
            jax.eval_shape(mean.__wrapped__, jnp.ones(n))
            mean.lower(jnp.ones(n))
    assert np.allclose(mean(jnp.ones(1) * RANK), (SIZE - 1) / 2)


def test_names_say_where_a_call_is():
    names = []

    def f(x):
        for _ in range(2):
            names.append(_names.of_call((x,)))
        names.append(_names.of_call((x,)))
        return x

    jax.make_jaxpr(f)(1.0)
    jax.make_jaxpr(f)(jnp.ones(2))
    first, second, third = names[:3]
    assert first.startswith("test_jax_programs.py:")
    assert second == f"{first}#2"
    assert third != first
    assert names[3:] == names[:3], "each trace begins anew"


def test_results_that_nobody_uses_leave_the_program_on_all_ranks():
    @jax.jit
    def f(x):
        hvd.allreduce(x)
        return x + 1

    assert "horovod" not in f.lower(jnp.ones(2)).compile().as_text()


def test_values_and_gradients():
    def loss(w, x):
        return (w * x).sum(), {"x": x}

    w, x = jnp.ones(3), jnp.full(3, RANK + 1.0)
    (value, aux), slope = jax.jit(hvd.value_and_grad(loss, has_aux=True))(w, x)
    assert float(value) == 3 * (RANK + 1)
    assert np.array_equal(aux["x"], x)
    assert np.allclose(slope, (SIZE + 1) / 2)
    slope, _ = hvd.grad(loss, has_aux=True, op=hvd.Sum)(w, x)
    assert np.allclose(slope, SIZE * (SIZE + 1) / 2)


@pytest.mark.parametrize("groups", [0, 2])
def test_a_pytree_of_gradients(groups):
    grads = {"w": jnp.full((2, 3), RANK + 1.0), "b": [jnp.arange(3.0), jnp.float32(RANK)]}
    for way in (lambda f: f, jax.jit):
        reduce = way(lambda g: hvd.allreduce_gradients(g, op=hvd.Sum, groups=groups))
        got = reduce(grads)
        assert np.allclose(got["w"], SIZE * (SIZE + 1) / 2)
        assert np.allclose(got["b"][0], SIZE * np.arange(3.0))
        assert np.allclose(got["b"][1], SIZE * (SIZE - 1) / 2)
    assert hvd.allreduce_gradients({}) == {}


def _address(capsule):
    api = ctypes.pythonapi
    api.PyCapsule_GetName.restype, api.PyCapsule_GetName.argtypes = (
        ctypes.c_char_p,
        (ctypes.py_object,),
    )
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
    return api.PyCapsule_GetPointer(capsule, api.PyCapsule_GetName(capsule))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="JAX has taken them already")
def test_programs_for_gpus_have_the_same_calls_which_other_functions_carry_out():
    program = jax.jit(lambda x: hvd.allgather(hvd.allreduce(x, op=hvd.Sum)))
    traced = program.trace(jnp.ones(2))
    for platform in ("cpu", "cuda"):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert "custom_call @horovod_xla_allreduce(" in text
        assert "custom_call @horovod_xla_allgather(" in text

    # As JAX's plugin for CUDA asks for what was registered before it came.
    registered = {}
    xla_client.register_custom_call_handler(
        "CUDA", lambda *call: registered.update({call[0]: call})
    )

    library = ctypes.CDLL(_core.__file__)
    for kind in ("allreduce", "broadcast", "allgather", "alltoall", "reducescatter"):
        _, capsule, platform, version, traits = registered[f"horovod_xla_{kind}"]
        function = getattr(library, f"horovod_xla_cuda_{kind}")
        assert _address(capsule) == ctypes.cast(function, ctypes.c_void_p).value
        assert (platform, version) == ("CUDA", 1)
        assert traits == xla_client.CustomCallTargetTraits.DEFAULT


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="JAX itself has loaded CUDA")
def test_nothing_of_cuda_is_loaded_for_programs_on_the_cpu():
    assert jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum))(jnp.float32(1)) == SIZE
    assert "libcuda.so" not in Path("/proc/self/maps").read_text()
