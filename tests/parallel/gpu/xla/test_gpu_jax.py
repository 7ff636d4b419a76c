"""`horovod.jax` inside of compiled programs on GPUs.

Over the double JAX runs on the CPU, with handlers of `xla_on_double`. On a machine with GPUs it is JAX for CUDA.
"""

import re

import numpy as np
import pytest
import xla_frames
from devices import IS_REAL, number_of_gpus

if IS_REAL:  # a machine with GPUs need not have them
    pytest.importorskip("jax")
    pytest.importorskip("optax")

import jax
import jax.numpy as jnp
import optax

import horovod.jax as hvd
from horovod.jax import _calls

hvd.init()
SIZE, RANK = hvd.size(), hvd.rank()
DEVICE = hvd.local_rank() % number_of_gpus()
several = pytest.mark.skipif(SIZE == 1, reason="needs two ranks")
KINDS = [
    _calls.ALLREDUCE,
    _calls.BROADCAST,
    _calls.ALLGATHER,
    _calls.ALLTOALL,
    _calls.REDUCESCATTER,
]

if IS_REAL:
    if jax.default_backend() != "gpu":
        pytest.skip("JAX finds no GPU", allow_module_level=True)
    jax.config.update("jax_default_device", jax.devices()[DEVICE])
else:
    import xla_on_double

    for _kind in KINDS:
        _function = jax.ffi.pycapsule(xla_on_double.handler(_kind.target, DEVICE))
        jax.ffi.register_ffi_target(_kind.target, _function, platform="cpu")
    _calls._registered = True
    _on_host = jax.ffi.pycapsule(xla_frames.handler("horovod_xla_allreduce"))
    jax.ffi.register_ffi_target("on_the_host", _on_host, platform="cpu")


@pytest.fixture(autouse=True)
def _through_the_handlers_for_gpus():
    if IS_REAL:
        yield
        return
    with xla_on_double.some_calls():
        yield


def ranks():
    return np.arange(1, SIZE + 1, dtype=np.float32)


def test_operations():
    x = jnp.arange(2.0 * SIZE).reshape(2 * SIZE, 1) + RANK
    everyones = [np.asarray(x) - RANK + rank for rank in range(SIZE)]

    @jax.jit
    def program(x):
        pair = hvd.grouped_allreduce([x, x.astype(jnp.bfloat16)], op=hvd.Sum)
        return (
            hvd.allreduce(x),
            pair,
            hvd.broadcast(x, SIZE - 1),
            hvd.allgather(x),
            hvd.alltoall(x),
            hvd.reducescatter(x, op=hvd.Sum),
        )

    average, pair, sent, gathered, exchanged, scattered = program(x)
    assert np.allclose(average, np.mean(everyones, 0))
    assert np.array_equal(pair[0], np.sum(everyones, 0))
    assert pair[1].dtype == jnp.bfloat16
    assert np.array_equal(pair[1].astype(np.float32), np.sum(everyones, 0))
    assert np.array_equal(sent, everyones[-1])
    assert np.array_equal(gathered, np.concatenate(everyones))
    parts = [np.split(tensor, SIZE)[RANK] for tensor in everyones]
    assert np.array_equal(exchanged, np.concatenate(parts))
    assert np.array_equal(scattered, np.sum(parts, 0))


def test_gradients():
    x, weights = jnp.ones(3 * SIZE), jnp.float32(RANK + 1)
    slope = jax.jit(jax.grad(lambda x: (weights * hvd.allreduce(x, op=hvd.Sum)).sum()))
    assert np.allclose(slope(x), np.full_like(x, ranks().sum()))
    slope = jax.jit(jax.grad(lambda x: (weights * hvd.allgather(x)).sum()))
    assert np.allclose(slope(x), np.full_like(x, ranks().mean()))


def test_loops_and_batches():
    def body(carry, x):
        return carry + hvd.allreduce(x, op=hvd.Sum), hvd.allreduce(carry)

    final, seen = jax.jit(lambda xs: jax.lax.scan(body, jnp.zeros(2), xs))(jnp.ones((3, 2)))
    assert np.array_equal(final, np.full(2, 3.0 * SIZE))
    assert np.array_equal(seen[:, 0], SIZE * np.arange(3.0))
    batch = jnp.arange(6.0).reshape(3, 2) + RANK
    assert np.allclose(jax.jit(jax.vmap(hvd.allreduce))(batch), batch - RANK + (SIZE - 1) / 2)


def test_donated_operands_are_worked_on_in_place():
    step = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum), donate_argnums=0)
    x = jnp.full((64, 64), RANK + 1.0) + 0
    before = x.unsafe_buffer_pointer()
    y = step(x)
    assert y.unsafe_buffer_pointer() == before
    assert np.array_equal(y, np.full((64, 64), ranks().sum()))
    kept = jnp.ones(4)
    assert jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum))(kept)[0] == SIZE
    assert np.array_equal(kept, np.ones(4)), "an operand that is not donated was changed"


def test_arrays_without_elements():
    results = jax.jit(lambda x: hvd.grouped_allreduce([x, jnp.ones(2)], op=hvd.Sum))(
        jnp.ones((0, 3))
    )
    assert results[0].shape == (0, 3)
    assert np.array_equal(results[1], np.full(2, SIZE))
    assert jax.jit(hvd.allgather)(jnp.ones((0, 3))).shape == (0, 3)


def test_training():
    tx = hvd.DistributedOptimizer(optax.sgd(0.5, momentum=0.5))

    @jax.jit
    def step(params, state, x):
        grads = jax.grad(lambda p: (p["w"] @ x + p["b"]).sum())(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = {"w": jnp.ones((2, 3)), "b": jnp.zeros(2)}
    state, plain = tx.init(params), {name: np.asarray(p) for name, p in params.items()}
    momentum = {name: np.zeros_like(p) for name, p in plain.items()}
    for number in range(4):
        params, state = step(params, state, jnp.full(3, number + RANK, jnp.float32))
        grads = {"w": np.full((2, 3), number + (SIZE - 1) / 2), "b": np.ones(2)}
        momentum = {name: 0.5 * momentum[name] + g for name, g in grads.items()}
        plain = {name: p - 0.5 * momentum[name] for name, p in plain.items()}
    assert np.allclose(params["w"], plain["w"])
    assert np.allclose(params["b"], plain["b"])


def test_programs_that_are_started_without_waiting():
    program = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum) / SIZE)
    x = jnp.full(8, RANK + 1.0)
    for _ in range(12):
        x = program(x)
    at_once = hvd.allreduce(np.float32(RANK), op=hvd.Sum, name="beside them")
    assert at_once == SIZE * (SIZE - 1) / 2
    assert np.allclose(x, ranks().mean())


@pytest.mark.skipif(IS_REAL, reason="one platform for each program")
def test_one_program_with_operations_on_both():
    def on_host(x, name):
        call = jax.ffi.ffi_call("on_the_host", jax.ShapeDtypeStruct(x.shape, x.dtype))
        return call(x, name=name, reduce_op=np.int32(hvd.Sum))

    @jax.jit
    def program(x):
        first = on_host(hvd.allreduce(x, op=hvd.Sum), "second")
        return hvd.allreduce(first + on_host(x, "beside"), op=hvd.Sum)

    total = ranks().sum()
    want = SIZE * (SIZE * total + total)
    assert np.allclose(program(jnp.full(4, RANK + 1.0)), np.full(4, want))


def calls_in(text):
    """The numbers of the values that the calls of a lowered program take and make, in its text's order."""
    lines = [line for line in text.splitlines() if "custom_call @horovod_xla_" in line]
    made = [re.match(r"\s*%(\w+)", line)[1] for line in lines]
    taken = [re.findall(r"%(\w+)", re.search(r"\((.*?)\)", line)[1]) for line in lines]
    counts = [re.search(r"after = (\d+)", line) for line in lines]
    return made, taken, [count and int(count[1]) for count in counts], lines


def test_each_call_comes_after_the_one_before():
    """Whatever XLA would do first: it decides that by what it has measured in its process."""

    def program(x, y):
        hvd.allreduce(x, name="unused")  # leaves the program
        pair = hvd.grouped_allreduce([y, x], name="pair")
        loss = hvd.allreduce(x * 2, name="loss")
        again = hvd.allreduce(loss.reshape(1), name="of the loss")
        return pair, again, hvd.allgather(y, name="rows"), hvd.broadcast(x, 0, name="sent")

    x, y = jnp.ones(()), jnp.ones((4 * SIZE, 2))
    lowered = jax.jit(program).trace(x, y).lower(lowering_platforms=("cuda",))
    made, taken, counts, lines = calls_in(lowered.as_text())
    names = [re.search(r'name = "([\w ]+)"', line)[1] for line in lines]
    assert names == ["pair", "loss", "of the loss", "rows", "sent"]
    # A call that takes a result of the previous call needs no extra operand.
    assert counts == [None, 1, None, 1, 1]
    orders = [values[-1] for values, count in zip(taken, counts, strict=True) if count]
    assert orders == [made[0], made[2], made[3]]
    assert "%0#1" in lines[1], "the smallest result keeps the least memory"
    pair, again, gathered, sent = jax.jit(program)(x, y)
    assert np.array_equal(pair[0], y)
    assert again == 2
    assert gathered.shape == (4 * SIZE * SIZE, 2)
    assert sent == 1


def total(x):
    return hvd.allreduce(x, op=hvd.Sum)


def scanned(x):
    final, seen = jax.lax.scan(lambda c, y: (c + total(y), total(c)), x, jnp.stack([x, 2 * x]))
    return total(3 * x), final + seen.sum(0), total(x)


def looped(x):
    end = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, total(c[1])), (0, x))[1]
    return total(3 * x), end, total(x)


def branched(x):
    return total(3 * x), jax.lax.cond(x[0] > 0, lambda: total(2 * x), lambda: x), total(x)


def called(x):
    inner = jax.jit(total)
    return total(3 * x), inner(x) + inner(2 * x), total(x)


def checkpointed(x):
    slope = jax.grad(lambda x: (jax.checkpoint(lambda x: total(x**2))(x) ** 2).sum())(x)
    return total(3 * x), slope, total(x)


def own_derivative(x):
    power = jax.custom_vjp(lambda x: total(x**2))
    power.defvjp(lambda x: (total(x**2), x), lambda x, g: (total(g) * 2 * x,))
    slope = jax.grad(lambda x: jax.lax.scan(lambda c, _: (power(c), 0), x, length=1)[0].sum())(x)
    return total(3 * x), slope, total(x)


def batched(x):
    rows = jax.vmap(hvd.allgather)(jnp.stack([x, x]))
    return total(3 * x), rows[0, :3], total(x)


def aggregated(x):
    tx = hvd.DistributedOptimizer(optax.sgd(1.0), op=hvd.Sum, backward_passes_per_step=2)
    _, state = tx.update(x, tx.init(x))
    updates, _ = tx.update(x, state)
    return total(3 * x), updates, total(x)


@pytest.mark.parametrize(
    ("program", "factor"),
    [
        (scanned, 1 + 5 * SIZE + SIZE**2),
        (looped, SIZE**3),
        (branched, 2 * SIZE),
        (called, 3 * SIZE),
        (checkpointed, 4 * SIZE**2),
        (own_derivative, 2 * SIZE),
        (batched, 1),
        (aggregated, -2 * SIZE),
    ],
)
def test_the_order_holds_across_functions_inside_a_program(program, factor):
    """There JAX hands a token on, which every call takes and gives back."""
    x = jnp.ones(3)
    lines = calls_in(jax.jit(program).lower(x).as_text())[3]
    assert len(lines) > 2
    for line in lines:
        taken, made = re.search(r" : \((.*)\) -> (.*)", line).groups()
        assert taken.startswith("!stablehlo.token, "), line
        assert made.startswith("(!stablehlo.token, "), line
    for got, want in zip(jax.jit(program)(x), (3 * SIZE, factor, SIZE), strict=True):
        assert np.allclose(got, np.full(3, want))


def test_programs_without_inner_functions_are_started_quickly():
    """JAX starts those with an ordered effect through Python."""
    program = jax.jit(lambda x: total(total(x)) + total(2 * x))
    assert not program.trace(jnp.ones(3)).jaxpr.effects
    assert np.allclose(program(jnp.ones(3)), SIZE**2 + 2 * SIZE)


def test_a_function_that_was_compiled_alone_before_is_told(caplog):
    inner = jax.jit(lambda x: hvd.allreduce(x, name="inner"))
    assert inner(jnp.float32(1)) == 1
    assert not caplog.records
    assert jax.jit(lambda x: inner(x) + hvd.allreduce(2 * x, name="outer"))(jnp.float32(1)) == 3
    assert [record.message for record in caplog.records if "several functions" in record.message]


def fails(program, *args, match):
    with pytest.raises((RuntimeError, ValueError), match=match):
        jax.block_until_ready(jax.jit(program)(*args))
    result = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum, name="after"))(jnp.ones(2))
    assert np.array_equal(result, np.full(2, SIZE))


@several
def test_ranks_that_disagree():
    fails(lambda x: hvd.allreduce(x, name="shapes"), jnp.ones(RANK + 1), match="Mismatched")


@several
def test_unequal_rows():
    match = "the ranks bring unequal numbers of rows"
    fails(lambda x: hvd.allgather(x, name="rows"), jnp.ones((RANK + 1, 2)), match=match)
