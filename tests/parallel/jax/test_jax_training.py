"""Training with `horovod.jax`: optimizers, compression, parameters, elastic state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import horovod.jax as hvd
from horovod.common.exceptions import HorovodInternalError, HorovodStalledError
from horovod.jax import elastic

hvd.init()
SIZE, RANK = hvd.size(), hvd.rank()
BATCH = 12  # of 1, 2, 3 and 4 ranks


def data(step):
    rng = np.random.default_rng(step)
    x = rng.normal(size=(BATCH, 5)).astype(np.float32)
    return x, np.tanh(x @ np.arange(5, dtype=np.float32))[:, None]


def init_params():
    rng = np.random.default_rng(7)
    return {
        "first": {"w": jnp.asarray(rng.normal(size=(5, 8)), jnp.float32), "b": jnp.zeros(8)},
        "last": jnp.asarray(rng.normal(size=(8, 1)), jnp.float32),
    }


def loss_fn(params, x, y):
    hidden = jnp.tanh(x @ params["first"]["w"] + params["first"]["b"])
    return ((hidden @ params["last"] - y) ** 2).mean()


def trained(tx, share, steps=8):
    params = init_params()
    state = tx.init(params)

    @jax.jit
    def step(params, state, x, y):
        grads = jax.grad(loss_fn)(params, x, y)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for i in range(steps):
        x, y = (part[share] for part in data(i))
        params, state = step(params, state, x, y)
    return params


MINE = slice(RANK * BATCH // SIZE, (RANK + 1) * BATCH // SIZE)


def close(got, want, atol=1e-5):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.allclose(a, b, atol=atol)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"groups": 2},
        {"gradient_predivide_factor": 2.0},
        {"compression": hvd.Compression.bf16},
        {"compression": hvd.Compression.fp16},
    ],
)
def test_training_equals_that_of_one_process_on_the_whole_batch(options):
    want = trained(optax.adam(0.05), slice(None))
    got = trained(hvd.DistributedOptimizer(optax.adam(0.05), **options), MINE)
    close(got, want, 0.1 if "compression" in options else 1e-4)
    everyone = hvd.allgather_object(jax.tree.map(np.asarray, got))
    close(everyone[0], got, 0)


def test_without_the_reduction_ranks_would_drift_apart():
    if SIZE == 1:
        pytest.skip("nobody to differ from")
    alone = hvd.allgather_object(jax.tree.map(np.asarray, trained(optax.adam(0.05), MINE)))
    assert not np.allclose(alone[0]["last"], alone[1]["last"], atol=1e-4)


def test_several_backward_passes_per_step():
    """For two steps: the second begins with nothing of the first."""
    plain = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1))
    tx = hvd.DistributedOptimizer(
        plain, backward_passes_per_step=2, average_aggregated_gradients=True
    )
    params = whole = init_params()
    state, plain_state = tx.init(params), plain.init(whole)
    update = jax.jit(tx.update)
    halves = np.array_split(np.arange(BATCH)[MINE], 2)
    for step in range(2):
        x, y = data(step)
        for i, half in enumerate(halves):
            grads = jax.grad(loss_fn)(params, x[half], y[half])
            updates, state = update(grads, state, params)
            assert int(state.passes) == (i + 1) % 2
            assert bool(jax.tree.leaves(updates)[0].any()) == (i == 1)
            params = optax.apply_updates(params, updates)
        updates, plain_state = plain.update(jax.grad(loss_fn)(whole, x, y), plain_state, whole)
        whole = optax.apply_updates(whole, updates)
        close(params, whole, 1e-5)


def test_an_optimizer_may_update_twice_in_one_program():
    tx = hvd.DistributedOptimizer(optax.sgd(1.0), op=hvd.Sum)

    @jax.jit
    def twice(a, b):
        return tx.update(a, tx.init(a))[0], tx.update(b, tx.init(b))[0]

    first, second = twice(jnp.ones(3), jnp.full(3, 2.0))
    assert np.array_equal(first, np.full(3, -SIZE))
    assert np.array_equal(second, np.full(3, -2.0 * SIZE))


def test_arguments_of_optimizers_are_checked():
    with pytest.raises(TypeError, match=r"takes an optax.GradientTransformation, .* not dict"):
        hvd.DistributedOptimizer({"tx": optax.sgd(0.1)})
    with pytest.raises(ValueError, match="backward_passes_per_step"):
        hvd.DistributedOptimizer(optax.sgd(1.0), backward_passes_per_step=0)
    with pytest.raises(ValueError, match="gradient_predivide_factor"):
        hvd.DistributedOptimizer(optax.sgd(1.0), op=hvd.Sum, gradient_predivide_factor=2.0)


def test_parameters_of_the_root():
    params = {
        "w": jnp.full((2, 3), float(RANK)),
        "half": jnp.full(2, RANK, jnp.bfloat16),
        "key": jax.random.key(RANK),
        "host": np.full(2, RANK),
        "step": RANK,
        "name": f"rank {RANK}",
        "none": None,
    }
    root = SIZE - 1
    got = hvd.broadcast_parameters(params, root)
    assert np.array_equal(got["w"], np.full((2, 3), root))
    assert got["half"].dtype == jnp.bfloat16
    assert float(got["half"][0]) == root
    assert (
        jax.random.key_data(got["key"]).tolist()
        == jax.random.key_data(jax.random.key(root)).tolist()
    )
    assert isinstance(got["host"], np.ndarray)
    assert got["host"].tolist() == [root, root]
    assert (got["step"], got["name"], got["none"]) == (root, f"rank {root}", None)
    state = optax.adam(0.1).init({"w": jnp.full(2, float(RANK))})
    close(hvd.broadcast_parameters(state, 0), optax.adam(0.1).init({"w": jnp.zeros(2)}))
    with pytest.raises(ValueError, match="outside of jit"):
        jax.jit(hvd.broadcast_parameters)(jnp.ones(2))


def test_a_state_goes_back_to_its_commit():
    params = {"w": jnp.full(3, float(RANK)), "key": jax.random.key(RANK)}
    state = hvd.elastic.JaxState(params=params, step=0)
    state.sync()
    assert np.array_equal(state.params["w"], np.zeros(3))
    state.save()
    kept = state.params["w"]
    donating = jax.jit(lambda w: w + 1, donate_argnums=0)
    state.params = {"w": donating(kept), "key": jax.random.key(5)}
    state.step = 3
    state.restore()
    assert np.array_equal(state.params["w"], np.zeros(3)), "a copy, for the array was donated"
    assert jax.random.key_data(state.params["key"]).tolist() == [0, 0]
    assert state.step == 0
    state.restore()
    assert np.array_equal(state.params["w"], np.zeros(3))


def test_errors_of_programs_are_horovods_in_elastic_functions():
    for kind in (HorovodInternalError, HorovodStalledError):
        with pytest.raises(kind, match="rank 1 was lost"):
            elastic.raise_if_ours(RuntimeError(f"ABORTED: {kind.__name__}: rank 1 was lost"))
    elastic.raise_if_ours(RuntimeError("INVALID_ARGUMENT: something else"))

    @hvd.elastic.run
    def train(state):
        raise ValueError("not ours")

    with pytest.raises(ValueError, match="not ours"):
        train(hvd.elastic.JaxState(w=jnp.ones(1)))
