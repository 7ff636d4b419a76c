"""`horovod.jax` beyond tests/conformance: pytrees, constants, what programs refuse, jobs that end."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import documented_names
import horovod.jax as hvd

hvd.init()
SIZE, RANK = hvd.size(), hvd.rank()
# As an array's method and as a part of a program.
WAYS = [lambda f: f, jax.jit]


@pytest.mark.parametrize("way", WAYS)
def test_numbers_and_constants(way):
    assert float(way(hvd.allreduce)(float(RANK))) == (SIZE - 1) / 2
    constant = way(lambda: hvd.allreduce(np.ones(3), op=hvd.Sum))()
    assert np.array_equal(constant, np.full(3, SIZE)), "an array that is no argument"


@pytest.mark.parametrize("way", WAYS)
def test_pytrees_are_one_operation(way):
    tree = {"a": jnp.full(2, RANK), "b": [jnp.ones(()), (jnp.float32(RANK),)], "none": None}
    got = way(lambda tree: hvd.allreduce(tree, op=hvd.Sum))(tree)
    total = SIZE * (SIZE - 1) / 2
    assert np.array_equal(got["a"], np.full(2, total))
    assert got["none"] is None
    assert float(got["b"][0]) == SIZE
    assert float(got["b"][1][0]) == total
    assert hvd.allreduce({}) == {}


def test_what_compiled_programs_refuse():
    with pytest.raises(ValueError, match="splits"):
        jax.jit(lambda x: hvd.alltoall(x, [1] * SIZE))(jnp.ones(SIZE))
    with pytest.raises(TypeError, match="Python numbers"):
        jax.jit(lambda f: hvd.allreduce(jnp.ones(2), prescale_factor=f))(2.0)
    with pytest.raises(ValueError, match="cannot send arrays of dtype float8"):
        jax.jit(hvd.allgather)(jnp.ones(2, jnp.float8_e4m3fn))
    if SIZE > 1:
        with pytest.raises(ValueError, match="pad it to a multiple"):
            jax.jit(hvd.reducescatter)(jnp.ones(SIZE + 1))
        gather = jax.jit(lambda x: hvd.allgather(x, name="uneven"))
        with pytest.raises((RuntimeError, ValueError), match="equally many rows"):
            jax.block_until_ready(gather(jnp.ones((RANK + 1, 2))))
        with pytest.raises((RuntimeError, ValueError), match="equally many rows"):
            # Nobody else's total is what a rank in the middle expects.
            jax.block_until_ready(gather(jnp.ones((2 * RANK + 1, 2))))
    assert hvd.allreduce(jnp.ones(1), op=hvd.Sum) == SIZE, "the job goes on"


def test_a_program_outlives_its_job():
    compiled = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum))
    assert compiled(jnp.ones(1)) == SIZE
    hvd.shutdown()
    try:
        with pytest.raises((RuntimeError, ValueError), match="not been initialized"):
            jax.block_until_ready(compiled(jnp.ones(1)))
    finally:
        hvd.init()
    assert compiled(jnp.ones(1)) == SIZE, "a program goes on in the next job"


def test_public_names():
    documented_names.check("horovod.jax")
    assert hvd.is_homogeneous()


def test_nccl_has_no_part_in_arrays_that_go_through_host_memory():
    assert hvd.nccl_built() == 0
