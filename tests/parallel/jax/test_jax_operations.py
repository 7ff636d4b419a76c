"""`horovod.jax`: every collective, outside and inside of compiled programs, in all forms, types and sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import documented_names
import horovod.jax as hvd

hvd.init()
SIZE, RANK = hvd.size(), hvd.rank()
DTYPES = ["uint8", "int8", "uint16", "int16", "uint32", "int32", "float16", "bfloat16"]
DTYPES += ["float32", "bool", "complex64"]
SHAPES = [(), (0,), (5,), (0, 3), (2, 1, 3), (70_001,)]
# As an array's method and as a part of a program.
WAYS = [lambda f: f, jax.jit]


def of(rank, shape, dtype):
    return np.asarray(np.arange(np.prod(shape)).reshape(shape) % 5 + rank).astype(jnp.dtype(dtype))


def everyone(shape, dtype):
    return [of(rank, shape, dtype) for rank in range(SIZE)]


def equal(got, want):
    assert isinstance(got, jax.Array)
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    assert np.array_equal(np.asarray(got), want)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_and_copies_of_every_type(dtype, way):
    root = SIZE - 1

    def program(operands):
        sums = [hvd.allreduce(x, op=hvd.Sum) for x in operands]
        copies = [hvd.broadcast(x, root) for x in operands]
        return sums, copies, hvd.grouped_allreduce([*operands, 1], op=hvd.Sum)

    mine = [of(RANK, shape, dtype) for shape in SHAPES]
    sums, copies, group = way(program)(mine)
    assert isinstance(group, list)
    assert group.pop() == SIZE
    for i, shape in enumerate(SHAPES):
        want = np.sum(everyone(shape, dtype), axis=0).astype(jnp.dtype(dtype))
        equal(sums[i], want)
        equal(group[i], want)
        equal(copies[i], of(root, shape, dtype))
        assert np.array_equal(mine[i], of(RANK, shape, dtype)), "the operand was changed"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_every_type(dtype, way):
    shapes = [(2 * SIZE, *rest) for rest in [(), (3,), (0,), (2, 1)]] + [(0, 3)]

    def program(operands):
        rows = [(hvd.allgather(x), hvd.alltoall(x)) for x in operands]
        shares = [hvd.reducescatter(x, op=hvd.Sum) for x in operands]
        gathered = hvd.grouped_allgather([*operands, jnp.ones((1, 2))])
        return rows, shares, gathered, hvd.grouped_reducescatter(operands, op=hvd.Sum)

    mine = [of(RANK, shape, dtype) for shape in shapes]
    rows, shares, gathered, group = way(program)(mine)
    assert np.array_equal(gathered.pop(), np.ones((SIZE, 2)))
    for i, shape in enumerate(shapes):
        each = everyone(shape, dtype)
        parts = [x[RANK * len(x) // SIZE :][: len(x) // SIZE] for x in each]
        want = np.sum(parts, axis=0).astype(jnp.dtype(dtype))
        equal(rows[i][0], np.concatenate(each))
        equal(gathered[i], np.concatenate(each))
        equal(rows[i][1], np.concatenate(parts))
        equal(shares[i], want)
        equal(group[i], want)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("op", ["Average", "Min", "Max", "Product", "Adasum"])
def test_other_operators(op, way):
    got = way(lambda x: hvd.allreduce(x, op=getattr(hvd, op)))(jnp.full((2, 3), RANK + 1.0))
    ranks = np.arange(1.0, SIZE + 1)
    want = {"Average": ranks.mean(), "Min": 1.0, "Max": SIZE, "Product": ranks.prod()}.get(op)
    if want is None:  # parallel vectors: Adasum of equal directions is an average, pair by pair
        want = got[0, 0]
        assert 1 <= want <= SIZE
    assert np.allclose(got, want)


@pytest.mark.parametrize("way", WAYS)
def test_factors_numbers_and_names(way):
    scaled = way(
        lambda x: hvd.allreduce(x, op="sum", prescale_factor=0.5, postscale_factor=3.0, name="f")
    )(jnp.ones(2))
    assert np.array_equal(scaled, np.full(2, 1.5 * SIZE, np.float32))
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
    with pytest.raises(ValueError, match="at least one tensor"):
        hvd.grouped_allreduce([])


def test_uneven_rows_outside_of_programs():
    got = hvd.allgather(jnp.full((RANK + 1, 2), RANK))
    assert got.shape == (SIZE * (SIZE + 1) // 2, 2)
    share = hvd.reducescatter(jnp.ones((SIZE + 1, 2)), op=hvd.Sum)
    assert share.shape[0] == 1 + (RANK == 0)
    output, received = hvd.alltoall(jnp.arange(SIZE + 1), [2] + [1] * (SIZE - 1))
    assert received.tolist() == [2 if RANK == 0 else 1] * SIZE
    assert output.shape == (int(received.sum()),)


def test_uneven_rows_inside_of_programs_are_refused():
    for f in (hvd.reducescatter, hvd.alltoall):
        if SIZE > 1:
            with pytest.raises(ValueError, match="pad it to a multiple"):
                jax.jit(f)(jnp.ones(SIZE + 1))
    for f in (hvd.reducescatter, hvd.alltoall, hvd.allgather):
        with pytest.raises(ValueError, match="at least one dimension"):
            jax.jit(f)(1.0)
    with pytest.raises(ValueError, match="splits"):
        jax.jit(lambda x: hvd.alltoall(x, [1] * SIZE))(jnp.ones(SIZE))
    if SIZE > 1:
        gather = jax.jit(lambda x: hvd.allgather(x, name="uneven"))
        with pytest.raises((RuntimeError, ValueError), match="equally many rows"):
            jax.block_until_ready(gather(jnp.ones((RANK + 1, 2))))
        with pytest.raises((RuntimeError, ValueError), match="equally many rows"):
            # Nobody else's total is what a rank in the middle expects.
            jax.block_until_ready(gather(jnp.ones((2 * RANK + 1, 2))))
    assert hvd.allreduce(jnp.ones(1), op=hvd.Sum) == SIZE, "the job goes on"


def test_mistakes_are_told():
    with pytest.raises(ValueError, match="not supported for op Average"):
        jax.jit(hvd.allreduce)(jnp.ones(2, bool))
    with pytest.raises(ValueError, match="op="):
        hvd.allreduce(jnp.ones(2), op="no operator")
    with pytest.raises(ValueError, match="invalid root rank"):
        hvd.broadcast(jnp.ones(2), -1)
    with pytest.raises(TypeError, match="name is a string"):
        hvd.allreduce(jnp.ones(2), name=3)
    with pytest.raises(TypeError, match="Python numbers"):
        jax.jit(lambda f: hvd.allreduce(jnp.ones(2), prescale_factor=f))(2.0)
    with pytest.raises(hvd.HorovodInternalError, match="AVERAGE and SUM"):
        hvd.reducescatter(jnp.ones(SIZE), op=hvd.Max)
    with pytest.raises(ValueError, match="cannot send arrays of dtype float8"):
        jax.jit(hvd.allgather)(jnp.ones(2, jnp.float8_e4m3fn))


def test_ranks_that_disagree_get_the_cores_words():
    if SIZE == 1:
        pytest.skip("nobody to disagree with")
    reduce = jax.jit(lambda x: hvd.allreduce(x, name="shape"))
    with pytest.raises((RuntimeError, ValueError), match="HorovodInternalError: Mismatched"):
        jax.block_until_ready(reduce(jnp.ones(2 + RANK % 2)))
    with pytest.raises((RuntimeError, ValueError), match="HorovodInternalError: Mismatched"):
        jax.block_until_ready(reduce(jnp.ones(2, [jnp.float32, jnp.int32][RANK % 2])))
    with pytest.raises((RuntimeError, ValueError), match="root rank"):
        jax.block_until_ready(jax.jit(lambda x: hvd.broadcast(x, RANK % 2, name="r"))(jnp.ones(2)))
    assert hvd.allreduce(jnp.ones(1), op=hvd.Sum) == SIZE, "the job goes on"


def test_process_sets():
    if SIZE == 1:
        pytest.skip("there is only the set of all ranks")
    hvd.shutdown()
    hvd.init(process_sets="dynamic")
    mine = hvd.add_process_set([0])
    try:
        if RANK == 0:
            got = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum, process_set=mine))(jnp.ones(2))
            assert np.array_equal(got, np.ones(2))
        else:
            with pytest.raises((RuntimeError, ValueError), match="process set"):
                jax.block_until_ready(
                    jax.jit(lambda x: hvd.allreduce(x, process_set=mine))(jnp.ones(2))
                )
        for way in WAYS:
            with pytest.raises((TypeError, ValueError), match="not registered"):
                way(lambda x: hvd.allreduce(x, process_set=hvd.ProcessSet([0])))(jnp.ones(2))
        hvd.barrier()  # so that nobody leaves before the others have asked
    finally:
        hvd.shutdown()
        hvd.init()


def test_before_init():
    hvd.shutdown()
    try:
        with pytest.raises(ValueError, match="not been initialized"):
            jax.jit(hvd.allreduce)(jnp.ones(2))
        with pytest.raises(ValueError, match="not been initialized"):
            hvd.allreduce(jnp.ones(2))
    finally:
        hvd.init()
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
