"""`hvd.Checkpoint`, `hvd.check_finite` and `hvd.global_gradient_norm` with arrays of JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import horovod.jax as hvd

hvd.init()
SIZE, RANK = hvd.size(), hvd.rank()


def state_of(number):
    params = {"w": jnp.full((2, 2), number, jnp.bfloat16), "b": (jnp.full(3, number), number)}
    return hvd.elastic.JaxState(params=params, key=jax.random.key(int(number)), step=int(number))


def test_all_ranks_go_on_from_the_file_of_rank_0(tmp_path):
    path = tmp_path / "training"
    hvd.Checkpoint(state_of(7.0), path).save()
    state = state_of(1.0 + RANK)
    assert hvd.Checkpoint(state, path).resume()
    assert state.params["w"].dtype == jnp.bfloat16
    assert np.asarray(state.params["w"], np.float32).tolist() == [[7.0, 7.0]] * 2
    assert state.params["b"][0].tolist() == [7.0] * 3
    assert state.params["b"][1] == 7.0
    want = jax.random.key_data(jax.random.key(7)).tolist()
    assert jax.random.key_data(state.key).tolist() == want
    assert state.step == 7


def test_a_file_of_other_shapes_is_an_error_on_all_ranks(tmp_path):
    path = tmp_path / "training"
    hvd.Checkpoint(hvd.elastic.JaxState(params=jnp.ones(3)), path).save()
    text = r"the file has arrays of the shapes \[\(3,\)\], the state has \[\(4,\)\]"
    with pytest.raises(ValueError, match=text):
        hvd.Checkpoint(hvd.elastic.JaxState(params=jnp.ones(4)), path).resume()


def test_a_file_of_other_names_is_an_error_on_all_ranks(tmp_path):
    path = tmp_path / "training"
    leaves = {"a": jnp.ones(3), "b": jnp.zeros(3)}
    hvd.Checkpoint(hvd.elastic.JaxState(params=leaves), path).save()
    renamed = {"b": jnp.ones(3), "c": jnp.zeros(3)}
    text = r"""only the file has the leaves \["\['a'\]"\], only the state has \["\['c'\]"\]"""
    with pytest.raises(ValueError, match=text):
        hvd.Checkpoint(hvd.elastic.JaxState(params=renamed), path).resume()


def test_nan_is_named_and_norms_are_computed():
    gradients = {"a": jnp.full(4, 300, jnp.bfloat16), "b": [jnp.float32(800)]}
    hvd.check_finite(gradients)
    assert hvd.global_gradient_norm(gradients) == pytest.approx(1000)
    if RANK == SIZE - 1:
        gradients["a"] = gradients["a"].at[1].set(jnp.nan)
    text = rf"rank {SIZE - 1}: 'a' has 1 NaN and 0 infinite of 4 values"
    with pytest.raises(FloatingPointError, match=text):
        hvd.check_finite(gradients)
