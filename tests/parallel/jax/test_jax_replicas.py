"""Replicas that never were equal, with an optimizer of optax: in compiled programs and outside of them."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest

import horovod.jax as hvd
import replica_warnings
from horovod.common import _replicas
from horovod.common.exceptions import ReplicasDifferError
from horovod.jax import elastic
from replica_warnings import begin_again, check_named, end_failed

hvd.init()
found = replica_warnings.found
# So many steps no job makes before rank 0 has all reports.
MANY = 500
MODES = pytest.mark.parametrize("mode", ["at once", "compiled", "donated", "scanned"])


def params_of(seed):
    key = jax.random.key(seed)
    return {"w": jax.random.normal(key, (3, 2)), "b": jnp.zeros(2)}


def loss_fn(params):
    return jnp.sum(jnp.ones((1, 3)) @ params["w"] + params["b"])


def train(params, mode, steps=3, **options):
    tx = hvd.DistributedOptimizer(optax.sgd(0.01), **options)

    def step(params, state):
        grads = jax.grad(loss_fn)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    if mode == "compiled":
        step = jax.jit(step)
    elif mode == "donated":
        step = jax.jit(step, donate_argnums=(0, 1))
    state = tx.init(params)
    if mode == "scanned":
        once = step
        step = jax.jit(lambda *c: jax.lax.scan(lambda c, _: (once(*c), None), c, length=2)[0])
    for _ in range(steps):
        params, state = step(params, state)
    return jax.block_until_ready(params)


@MODES
def test_a_forgotten_broadcast_is_named_with_the_tensor(found, mode):
    train(params_of(hvd.rank()), mode)
    check_named(
        found(),
        """'['w']' differs between rank 0, rank 1""",
        "1 of 2 parameters differ",
        "hvd.broadcast_parameters(params, root_rank=0)",
    )


@MODES
def test_equal_parameters_are_not_warned_of_and_every_generation_is_looked_at(found, mode):
    params = hvd.broadcast_parameters(params_of(hvd.rank()), root_rank=0)
    params = train(params, mode)
    assert found() == []
    train({**params, "b": params["b"] + hvd.rank()}, mode)
    check_named(found(), """'['b']'""")


@pytest.mark.parametrize(("row", "is_seen"), [(0, True), (1, False), (2, True)])
def test_of_large_models_the_ends_are_compared(found, monkeypatch, row, is_seen):
    monkeypatch.setattr(_replicas, "_WHOLE_BYTES_MAX", 0)
    monkeypatch.setattr(_replicas, "_BLOCK_BYTES", 8)
    params = params_of(7)
    params["w"] = params["w"].at[row].add(hvd.rank())
    train(params, "at once")
    if is_seen:
        check_named(found(), "['w']")
    else:
        assert found() == []


def test_accumulated_gradients_are_looked_at_as_well(found):
    train(params_of(hvd.rank()), "compiled", backward_passes_per_step=2)
    check_named(found(), """'['w']'""")


def test_two_models_of_one_shape_in_one_program_are_not_mixed_up(found):
    tx = hvd.DistributedOptimizer(optax.sgd(0.01))

    @jax.jit
    def step(first, last):
        stepped = []
        for params in (first, last):
            updates, _ = tx.update(jax.grad(loss_fn)(params), tx.init(params), params)
            stepped.append(optax.apply_updates(params, updates))
        return stepped

    first, last = params_of(1), params_of(2)
    lowered = step.lower(first, last).as_text()
    reported = re.findall(r'name = "(\d+)', lowered)
    assert len(reported) == len(set(reported)) == 2
    for _ in range(3):
        first, last = step(first, last)
    jax.block_until_ready((first, last))
    assert found() == []


def test_an_ensemble_is_reported_by_one_call_and_a_difference_in_any_member_is_found(found):
    tx = hvd.DistributedOptimizer(optax.sgd(0.01))

    def step(params):
        updates, _ = tx.update(jax.grad(loss_fn)(params), tx.init(params), params)
        return optax.apply_updates(params, updates)

    both = jax.tree.map(lambda a, b: jnp.stack([a, b]), params_of(1), params_of(2 + hvd.rank()))
    steps = jax.jit(jax.vmap(step))
    assert "while" not in steps.lower(both).as_text()
    jax.block_until_ready(steps(both))
    check_named(found(), """'['w']'""")


def test_gradients_may_be_numbers_of_python_and_empty(found):
    tx = hvd.DistributedOptimizer(optax.sgd(0.01))

    @jax.jit
    def step(params):
        grads = {"w": jax.grad(loss_fn)(params)["w"], "b": 0.0, "none": jnp.zeros((0, 2))}
        updates, _ = tx.update(grads, tx.init(params), params)
        return optax.apply_updates(params, updates)

    params = {**params_of(hvd.rank()), "none": jnp.zeros((0, 2))}
    jax.block_until_ready(step(params))
    check_named(found(), """'['w']'""")


def test_the_report_changes_no_bit_of_a_step(found, monkeypatch):
    checked = train(params_of(7), "compiled")
    monkeypatch.setenv("HOROVOD_CHECK_REPLICAS", "off")
    begin_again()
    unchecked = train(params_of(7), "compiled")
    monkeypatch.delenv("HOROVOD_CHECK_REPLICAS")
    assert found() == []
    for a, b in zip(jax.tree.leaves(checked), jax.tree.leaves(unchecked), strict=True):
        assert (a == b).all()


def test_as_an_error_it_ends_the_steps_of_every_rank(found, monkeypatch):
    monkeypatch.setenv("HOROVOD_CHECK_REPLICAS", "error")
    begin_again()
    with pytest.raises(Exception, match=r"ReplicasDifferError: .*differs between") as caught:
        train(params_of(hvd.rank()), "compiled", steps=MANY)
    with pytest.raises(ReplicasDifferError, match="differs between"):
        elastic.raise_if_ours(caught.value)
    monkeypatch.delenv("HOROVOD_CHECK_REPLICAS")
    end_failed()
