"""Without types of 64 bits no operation gives another value than the reduced one without a word."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse

import horovod.jax as hvd
from horovod.common._narrowing import PrecisionWarning

hvd.init()
BIG = 3_000_000_000


@pytest.mark.parametrize(
    "value", [np.int64(BIG), BIG, np.array([1, BIG]), np.float64(1e300), 1e300]
)
@pytest.mark.parametrize(
    "operation",
    [
        lambda x: hvd.allreduce(x, op=hvd.Max),
        lambda x: hvd.grouped_allreduce([x], op=hvd.Max),
        lambda x: hvd.broadcast(x, 0),
        lambda x: hvd.allgather(np.atleast_1d(x)),
        lambda x: hvd.alltoall(
            np.full(hvd.size(), x) if np.ndim(x) == 0 else np.tile(x, hvd.size())
        ),
    ],
    ids=["allreduce", "grouped", "broadcast", "allgather", "alltoall"],
)
def test_a_number_that_does_not_fit_is_an_error(operation, value):
    with pytest.raises(OverflowError, match=r"does not fit into .*jax_enable_x64"):
        operation(value)


def test_a_sum_that_does_not_fit_is_an_error():
    with pytest.raises(OverflowError, match="does not fit into int32"):
        hvd.allreduce(np.int64(2**31 - 1), op=hvd.Sum, postscale_factor=2)


@pytest.mark.parametrize(
    "call",
    [
        lambda: hvd.allreduce(2**33, op=hvd.Product),
        lambda: hvd.allreduce(np.array([2**33]), op=hvd.Product),
        lambda: hvd.grouped_allreduce([1, 2**33], op=hvd.Product),
        lambda: hvd.allreduce(2**62, op=hvd.Sum),
        lambda: jax.jit(lambda x: hvd.allreduce((x, 2**30), op=hvd.Sum))(jnp.ones(1)),
        lambda: jax.jit(lambda x: hvd.allreduce((x, 2**16), op=hvd.Product))(jnp.ones(1)),
        lambda: jax.jit(lambda x: hvd.allreduce((x, np.int64(2**30)), op=hvd.Sum))(jnp.ones(1)),
    ],
    ids=["number", "array", "group", "sum", "constant", "product", "typed"],
)
def test_integers_that_wrap_before_they_are_converted_are_an_error(call):
    if hvd.size() == 1:
        return
    with pytest.raises(OverflowError, match="does not fit into int"):
        call()


def test_what_fits_is_given_as_jax_has_it():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = hvd.allreduce(np.int64(5), op=hvd.Max)
        assert (int(result), result.dtype) == (5, jnp.int32)
        assert hvd.allreduce(np.array([0.5, np.nan, np.inf]), op=hvd.Max).dtype == jnp.float32
        assert hvd.allreduce(0.1, op=hvd.Max).dtype == jnp.float32


def test_what_is_rounded_is_told():
    with pytest.warns(PrecisionWarning, match="float64 is rounded to float32"):
        hvd.allreduce(np.array([0.1]), op=hvd.Max)


def test_constants_in_programs_are_checked():
    with pytest.raises(OverflowError, match="does not fit into int32"):
        jax.jit(lambda x: hvd.allreduce((x, np.int64(BIG)), op=hvd.Max))(jnp.ones(1))


@pytest.mark.parametrize("splits", [[0.5], np.array([1.0]), [True], np.array([1], np.float32)])
def test_splits_are_integers(splits):
    splits = np.asarray(splits).repeat(hvd.size())
    with pytest.raises(ValueError, match="1D list of integers as splits"):
        hvd.alltoall(jnp.zeros(2 * hvd.size()), splits)


def test_sparse_arrays_are_refused():
    matrix = sparse.BCOO.fromdense(jnp.eye(3))
    for operation in (hvd.allreduce, lambda x: hvd.grouped_allreduce([x])):
        with pytest.raises(ValueError, match=r"cannot combine sparse arrays \(BCOO\).*todense"):
            operation(matrix)
