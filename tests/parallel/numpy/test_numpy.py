"""`horovod.numpy`: what only NumPy has: kinds of arrays, types of any size, memory. For the rest see
tests/conformance.
"""

import weakref

import numpy as np
import pytest

import horovod.numpy as hvd

hvd.init()
SIZE, RANK = hvd.size(), hvd.rank()


@pytest.mark.parametrize("other", [np.transpose, np.copy, lambda a: a, lambda a: a[1:]])
def test_a_group_of_arrays_that_share_memory(other):
    mine = np.arange(16.0).reshape(4, 4) * (RANK + 1)
    alias = other(mine)
    hvd.grouped_allreduce_([mine, alias], op=hvd.Sum)
    want = np.arange(16.0).reshape(4, 4) * sum(range(1, SIZE + 1))
    assert np.array_equal(mine, want)
    assert np.array_equal(alias, other(want))


def layouts():
    base = np.arange(24.0).reshape(4, 6)
    readonly = base.copy()
    readonly.flags.writeable = False
    return {
        "fortran": np.asfortranarray(base),
        "readonly": readonly,
        "broadcast": np.broadcast_to(base[0], (3, 6)),
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


def test_a_gathered_array_may_be_written():
    got = hvd.allgather(np.full((RANK + 1, 2), RANK))
    got[...] = 7
    assert bool((got == 7).all())


def test_a_handle_gives_its_result_once():
    handle = hvd.allreduce_async(np.array([RANK]), op=hvd.Sum)
    assert hvd.synchronize(handle).tolist() == [SIZE * (SIZE - 1) // 2]
    assert hvd.synchronize(handle) is None


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


@pytest.mark.parametrize(
    "call",
    [
        lambda: hvd.allreduce(2**33, op=hvd.Product),
        lambda: hvd.allreduce([[1], [-(2**33)]], op=hvd.Product),
        lambda: hvd.grouped_allreduce([1, 2**33], op=hvd.Product),
        lambda: hvd.allreduce(2**62, op=hvd.Sum),
        lambda: hvd.reducescatter([2**62] * SIZE, op=hvd.Sum),
    ],
    ids=["number", "list", "group", "sum", "scattered"],
)
def test_a_result_of_pythons_integers_that_does_not_fit_is_an_error(call):
    if SIZE == 1:
        call()
        return
    with pytest.raises(OverflowError, match=r"the (product|sum) of \d+ such integers does not fit"):
        call()


def test_arrays_wrap_as_in_numpy_and_what_fits_is_exact():
    assert hvd.allreduce(np.int64(2**62), op=hvd.Sum) == np.full(SIZE, 2**62).sum()
    assert hvd.allreduce(-(2**20), op=hvd.Product) == (-(2**20)) ** SIZE
