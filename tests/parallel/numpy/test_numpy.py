"""`horovod.numpy`: every collective on arrays of every kind, layout and size."""

import weakref

import numpy as np
import pytest

import horovod.numpy as hvd

hvd.init()
SIZE, RANK = hvd.size(), hvd.rank()
DTYPES = ["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"]
DTYPES += ["float16", "float32", "float64", "bool"]
SHAPES = [(), (0,), (1,), (5,), (3, 4), (0, 3), (2, 1, 3), (70_001,)]


def of(rank, shape, dtype):
    return np.asarray(np.arange(np.prod(shape)).reshape(shape) % 5 + rank).astype(dtype)


def everyone(shape, dtype):
    return [of(rank, shape, dtype) for rank in range(SIZE)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [*DTYPES, "complex64", "complex128"])
def test_sums_of_every_form(dtype, shape):
    want = np.sum(everyone(shape, dtype), axis=0).astype(dtype)
    mine = of(RANK, shape, dtype)
    got = hvd.allreduce(mine, op=hvd.Sum)
    assert got.dtype == dtype
    assert got.shape == shape
    assert np.array_equal(got, want)
    assert np.array_equal(mine, of(RANK, shape, dtype))
    assert hvd.allreduce_(mine, op=hvd.Sum) is mine
    assert np.array_equal(mine, want)
    group = [of(RANK, shape, dtype), of(RANK, (2,), dtype)]
    reduced = hvd.grouped_allreduce(group, op=hvd.Sum)
    assert np.array_equal(reduced[0], want)
    assert len(reduced) == 2
    assert hvd.grouped_allreduce_(group, op=hvd.Sum)[0] is group[0]
    assert np.array_equal(group[0], want)


@pytest.mark.parametrize("other", [np.transpose, np.copy, lambda a: a, lambda a: a[1:]])
def test_a_group_of_arrays_that_share_memory(other):
    mine = np.arange(16.0).reshape(4, 4) * (RANK + 1)
    alias = other(mine)
    hvd.grouped_allreduce_([mine, alias], op=hvd.Sum)
    want = np.arange(16.0).reshape(4, 4) * sum(range(1, SIZE + 1))
    assert np.array_equal(mine, want)
    assert np.array_equal(alias, other(want))


@pytest.mark.parametrize("op", ["Average", "Min", "Max", "Product", "Adasum"])
def test_other_operators(op):
    got = hvd.allreduce(np.full((2, 3), RANK + 1.0), op=getattr(hvd, op))
    ranks = np.arange(1.0, SIZE + 1)
    want = {"Average": ranks.mean(), "Min": 1.0, "Max": SIZE, "Product": ranks.prod()}.get(op)
    if want is None:  # parallel vectors: Adasum of equal directions is an average, pair by pair
        want = got[0, 0]
    assert np.allclose(got, want)


def layouts():
    base = np.arange(24.0).reshape(4, 6)
    readonly = base.copy()
    readonly.flags.writeable = False
    return {
        "transposed": base.T,
        "strided": base[::2, ::3],
        "reversed": base[::-1],
        "fortran": np.asfortranarray(base),
        "byteswapped": base.astype(base.dtype.newbyteorder()),
        "readonly": readonly,
        "broadcast": np.broadcast_to(base[0], (3, 6)),
        "unaligned": np.frombuffer(bytearray(1 + base.nbytes), np.uint8)[1:].view(float),
        "matrix": np.ma.array(base),
        "list": base.tolist(),
        "scalar": np.float32(2),
    }


@pytest.mark.parametrize("layout", layouts())
def test_every_layout_is_read_as_it_is(layout):
    array = layouts()[layout]
    want = np.asarray(array) * SIZE
    assert np.array_equal(hvd.allreduce(array, op=hvd.Sum), want)
    assert np.array_equal(array, layouts()[layout])
    assert np.array_equal(hvd.broadcast(array, SIZE - 1), np.asarray(array))
    if not isinstance(array, np.ndarray) or not array.flags.writeable:
        with pytest.raises((TypeError, ValueError), match=r"read-only|Expected a numpy\.ndarray"):
            hvd.allreduce_(array)
        return
    assert hvd.allreduce_(array, op=hvd.Sum) is array
    assert np.array_equal(array, want)
    array[...] = RANK
    hvd.broadcast_(array, SIZE - 1)
    assert bool((array == SIZE - 1).all())


def test_rows_of_different_numbers_are_gathered():
    rows = np.full((RANK, 3), RANK, np.int16)
    got = hvd.allgather(rows)
    want = np.repeat(np.arange(SIZE), np.arange(SIZE)).astype(np.int16)
    assert got.dtype == np.int16
    assert np.array_equal(got, np.stack([want] * 3, axis=1))
    first, second = hvd.grouped_allgather([rows, np.array([RANK])])
    assert np.array_equal(first, got)
    assert np.array_equal(second, np.arange(SIZE))
    got[...] = 0  # the result is the caller's


@pytest.mark.parametrize(
    "dtype", ["complex64", "datetime64[s]", "S5", "U3", [("a", "i4"), ("b", "f8", 2)]]
)
def test_any_type_of_fixed_size_can_be_moved(dtype):
    value = np.zeros(3, dtype)
    value.view(np.uint8)[...] = np.arange(value.nbytes).reshape(value.view(np.uint8).shape) % 2
    if RANK == 0:
        got = hvd.broadcast(value, 0)
    else:
        got = hvd.broadcast(np.zeros(3, dtype), 0)
    assert got.dtype == value.dtype
    assert got.tobytes() == value.tobytes()
    assert hvd.allgather(value).tobytes() == value.tobytes() * SIZE
    if np.dtype(dtype).kind != "c":
        with pytest.raises(ValueError, match="not supported for op Sum"):
            hvd.allreduce(value, op=hvd.Sum)


def test_rows_go_to_every_rank():
    counts = [rank + 1 for rank in range(SIZE)]
    mine = np.repeat(np.arange(SIZE), counts) * 10 + RANK
    got, received = hvd.alltoall(mine, splits=counts)
    assert got.tolist() == [RANK * 10 + sender for sender in range(SIZE) for _ in range(RANK + 1)]
    assert received.tolist() == [RANK + 1] * SIZE
    assert received.dtype == np.int32
    even = hvd.alltoall(np.full(2 * SIZE, RANK))
    assert even.tolist() == [sender for sender in range(SIZE) for _ in range(2)]


def test_parts_of_the_sum():
    rows = np.ones((2 * SIZE + 1, 3), np.float32) * (RANK + 1)
    total = SIZE * (SIZE + 1) / 2
    got = hvd.reducescatter(rows, op=hvd.Sum)
    assert got.shape == (3 if RANK == 0 else 2, 3)
    assert bool((got == total).all())
    first, _ = hvd.grouped_reducescatter([rows, rows], op=hvd.Average)
    assert np.allclose(first, total / SIZE)


def test_handles_end_in_any_order_and_give_their_result_once():
    handles = [
        hvd.allreduce_async(np.array([i + RANK]), name=f"n{i}", op=hvd.Sum) for i in range(20)
    ]
    for i, handle in reversed(list(enumerate(handles))):
        assert hvd.synchronize(handle).tolist() == [i * SIZE + SIZE * (SIZE - 1) // 2]
        assert hvd.synchronize(handle) is None


def test_what_holds_no_values_is_refused():
    for call in (hvd.allreduce, hvd.allgather, hvd.reducescatter, hvd.alltoall):
        with pytest.raises(TypeError, match=r"Expected a numpy\.ndarray, got str"):
            call("text")
        with pytest.raises(ValueError, match="references to objects"):
            call(np.array([None]))
        with pytest.raises(ValueError, match="lose its mask"):
            call(np.ma.masked_array(np.zeros(SIZE), mask=np.ones(SIZE)))
    with pytest.raises(ValueError, match="scalar"):
        hvd.reducescatter(np.complex64(1))
    for bad in ([[1]], ["a"], [-1] * SIZE):
        with pytest.raises(ValueError, match="alltoall expects"):
            hvd.alltoall(np.zeros(SIZE), splits=bad)
    with pytest.raises(ValueError, match="at least one"):
        hvd.grouped_allreduce([])
    for scalar in (np.float32(1), np.complex64(1)):
        with pytest.raises((ValueError, hvd.HorovodInternalError)):
            hvd.allgather(scalar)


def test_objects_and_process_sets():
    assert hvd.broadcast_object({"rank": RANK}) == {"rank": 0}
    assert hvd.allgather_object(RANK) == list(range(SIZE))
    hvd.barrier()
    assert hvd.global_process_set.size() == SIZE


def test_an_array_in_flight_cannot_be_resized():
    array = np.full(1 << 16, 1.0)
    handle = hvd.allreduce_async_(array, op=hvd.Sum)
    with pytest.raises(ValueError, match="cannot resize"):
        array.resize(1 << 20)
    assert hvd.synchronize(handle) is array
    assert bool((array == SIZE).all())


def test_an_empty_group_is_refused_before_its_operator_is_looked_at():
    with pytest.raises(ValueError, match="at least one"):
        hvd.grouped_reducescatter_async([], op=hvd.Min)


@pytest.mark.parametrize(
    "begin",
    [
        lambda x: hvd.allreduce_async(x, op=hvd.Sum),
        lambda x: hvd.grouped_allreduce_async([x], op=hvd.Sum),
        lambda x: hvd.allgather_async(x),
        lambda x: hvd.reducescatter_async(x, op=hvd.Sum),
        lambda x: hvd.alltoall_async(x),
    ],
    ids=["allreduce", "grouped_allreduce", "allgather", "reducescatter", "alltoall"],
)
def test_an_operand_is_free_once_its_operation_has_ended(begin):
    operand = np.ones((2 * SIZE, 3), np.float32)
    dropped = weakref.ref(operand)
    handle = begin(operand)
    del operand
    while not hvd.poll(handle):
        pass
    hvd.poll(handle)  # gives back what the engine's thread has let go of meanwhile
    assert dropped() is None
    hvd.synchronize(handle)
