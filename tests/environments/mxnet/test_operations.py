"""`horovod.mxnet`: every operation, where results appear, and what is raised where."""

import gc
import threading
import warnings

import mxnet as mx
import numpy as np
import pytest

import documented_names
import horovod.mxnet as hvd
from horovod.common.process_sets import ProcessSet
from horovod.mxnet import _arrays, _operations, mpi_ops

hvd.init()
SIZE, RANK = hvd.size(), hvd.rank()
DTYPES = ["float32", "float64", "float16", "uint8", "int8", "int32", "int64"]
TOTAL = SIZE * (SIZE + 1) // 2
several = pytest.mark.skipif(SIZE == 1, reason="needs two ranks")


def of(rank, shape, dtype="float32"):
    return mx.nd.array(np.arange(np.prod(shape)).reshape(shape) % 5 + rank + 1, dtype=dtype)


def total(shape):
    return sum(of(rank, shape).asnumpy() for rank in range(SIZE))


def same(array, want):
    assert type(array) is mx.nd.NDArray
    got = array.asnumpy()
    assert got.shape == np.shape(want)
    assert np.array_equal(got, np.asarray(want).astype(got.dtype)), (got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (5,), (3, 4), (2, 1, 3), (70_001,)])
def test_sums_of_every_type(dtype, shape):
    mine = of(RANK, shape, dtype)
    got = hvd.allreduce(mine, op=hvd.Sum)
    assert got.dtype == np.dtype(dtype)
    assert got.context == mine.context
    same(got, total(shape))
    same(mine, of(RANK, shape).asnumpy())
    assert hvd.allreduce_(mine, op=hvd.Sum) is mine
    same(mine, total(shape))


def test_operators_and_factors():
    mine = mx.nd.full((3,), RANK + 1)
    ranks = np.arange(1.0, SIZE + 1)
    for op, want in [
        (hvd.Average, ranks.mean()),
        (hvd.Sum, ranks.sum()),
        (hvd.Min, 1),
        (hvd.Max, SIZE),
        (hvd.Product, ranks.prod()),
    ]:
        same(hvd.allreduce(mine, op=op), np.full(3, np.float32(want)))
    same(hvd.allreduce(mine), np.full(3, np.float32(ranks.mean())))
    got = hvd.allreduce(mine, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5)
    same(got, np.full(3, ranks.sum()))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        same(hvd.allreduce(mine, average=False), np.full(3, ranks.sum()))
    assert any(w.category is DeprecationWarning for w in seen)
    with pytest.raises(ValueError, match=r"The op parameter supersedes average\. Please"):
        hvd.allreduce(mine, average=True, op=hvd.Sum)
    with pytest.raises(AssertionError, match="Adasum"):
        hvd.allreduce(mine, op=hvd.Adasum)


@pytest.mark.parametrize("flag", [(), (0, 3)])
def test_arrays_without_dimensions_or_elements(flag):
    with mx.util.np_shape(True):
        mine = mx.nd.ones(flag) * (RANK + 1)
        for got in (hvd.allreduce(mine, op=hvd.Sum), hvd.broadcast(mine, 0), hvd.allreduce_(mine)):
            assert got.shape == flag
            got.wait_to_read()
    if not flag:
        same(hvd.allreduce(mine, op=hvd.Sum), np.float32(TOTAL))  # mine is the average by now
        assert mine.asscalar() == TOTAL / SIZE


def test_bool_and_numpy_arrays():
    mine = mx.nd.array([RANK == 0, False], dtype=bool)
    same(hvd.allreduce(mine, op=hvd.Max), [True, False])
    same(hvd.broadcast(mine, SIZE - 1), [SIZE == 1, False])
    assert hvd.allgather(mine).dtype == np.bool_
    same(hvd.allreduce(mx.np.array([1.0, RANK]), op=hvd.Sum), [SIZE, TOTAL - SIZE])
    same(hvd.allgather(mx.np.array([float(RANK)])), range(SIZE))


def test_groups():
    group = [of(RANK, (3,)), of(RANK, (2, 2), "int64"), of(RANK, (4,), "float16")]
    for got in (hvd.grouped_allreduce(group, op=hvd.Sum, name="g"),):
        for array, shape in zip(got, [(3,), (2, 2), (4,)], strict=True):
            same(array, total(shape))
    assert hvd.grouped_allreduce_(group, op=hvd.Sum) is group
    same(group[1], total((2, 2)))
    assert hvd.grouped_allreduce([]) == []
    # A group of one is the operation of its only array.
    if SIZE > 1:
        one = [of(RANK, (3,))]
        got = hvd.grouped_allreduce(one, name="o")[0] if RANK else hvd.allreduce(one[0], name="o")
        same(got, np.float32(total((3,)) / SIZE))


def test_views_are_ordered_by_the_array_they_belong_to():
    whole = mx.nd.full((4, 2), RANK + 1)
    hvd.grouped_allreduce_([whole[0:2], whole[2:4]], op=hvd.Sum)
    same(whole, np.full((4, 2), TOTAL))
    hvd.allreduce_(whole[1], op=hvd.Sum)
    same(whole[1], np.full(2, TOTAL * SIZE))
    same(whole[0], np.full(2, TOTAL))
    got = hvd.grouped_allreduce([whole, whole], op=hvd.Max)
    same(got[1], whole.asnumpy())


def test_arrays_of_a_group_that_overlap_are_refused():
    mine = mx.nd.ones((4,))
    hvd.grouped_allreduce_([mine[0:3], mine[2:4]])
    with pytest.raises(mx.MXNetError, match="share memory"):
        mine.wait_to_read()


def test_the_engine_orders_what_depends_on_each_other():
    mine = mx.nd.full((1000,), RANK + 1)
    for _ in range(20):
        mine += 1
        hvd.allreduce_(mine, op=hvd.Max, name="chain")
        mine -= 1
        hvd.allreduce_(mine, op=hvd.Max, name="chain")
    same(mine, np.full(1000, SIZE))
    outputs = [hvd.allreduce(mine * i, op=hvd.Sum, priority=i % 7 - 3) for i in range(50)]
    mine[:] = 0  # written after they have read it
    gc.collect()
    for i, output in enumerate(outputs):
        same(output, np.full(1000, SIZE * SIZE * i))


def test_ranks_start_named_operations_in_other_orders():
    order = list(range(20))
    if RANK % 2:
        order.reverse()
    got = {i: hvd.allreduce(mx.nd.full((i + 1,), i), op=hvd.Sum, name=f"o{i}") for i in order}
    for i in range(20):
        same(got[i], np.full(i + 1, i * SIZE))


def test_an_array_may_be_dropped_while_it_is_reduced():
    for _ in range(20):
        hvd.allreduce_(mx.nd.ones((1000,)))
        kept = hvd.allreduce(mx.nd.ones((1000,)), op=hvd.Sum)
    gc.collect()
    same(kept, np.full(1000, SIZE))
    mx.nd.waitall()


def test_several_threads():
    def work(k):
        mine = mx.nd.full((100,), RANK + k)
        for i in range(10):
            hvd.allreduce_(mine, op=hvd.Max, name=f"thread{k}.{i}")
        results[k] = mine.asnumpy()

    results = {}
    threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((results[k] == SIZE - 1 + k).all() for k in range(3))


def test_orders_in_memory_of_mkl_dnn():
    """Results of convolutions, and weights after inference, are not row-major."""
    net = mx.gluon.nn.Conv2D(32, 3, in_channels=16)
    net.initialize(mx.init.One())
    images = mx.nd.ones((4, 16, 12, 12)) * (RANK + 1)
    want = net(images).asnumpy()
    for got in (hvd.allreduce(net(images), op=hvd.Max), hvd.allreduce_(net(images), op=hvd.Max)):
        same(got, want / (RANK + 1) * SIZE)
    net(images).wait_to_read()
    same(hvd.broadcast(net.weight.data(), 0), np.ones((32, 16, 3, 3)))
    net(images).wait_to_read()
    assert hvd.allgather(net.weight.data()).shape == (32 * SIZE, 16, 3, 3)


def test_results_are_constants_of_autograd():
    x = mx.nd.ones((3,))
    x.attach_grad()
    with mx.autograd.record():
        y = (x * 2 * hvd.allreduce(x, op=hvd.Sum)).sum()
    y.backward()
    same(x.grad, np.full(3, 2 * SIZE))


@pytest.mark.parametrize("dtype", DTYPES)
def test_broadcast(dtype):
    for root in range(SIZE):
        mine = of(RANK, (2, 3), dtype)
        got = hvd.broadcast(mine, root, name=None)
        same(got, of(root, (2, 3)).asnumpy())
        same(mine, of(RANK, (2, 3)).asnumpy())
        assert hvd.broadcast_(mine, root, name=3) is mine
        same(mine, of(root, (2, 3)).asnumpy())


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_gives_rows(dtype):
    mine = mx.nd.full((RANK + 1, 2), RANK, dtype=dtype)
    want = np.repeat(np.arange(SIZE), np.arange(1, SIZE + 1))
    got = hvd.allgather(mine, name="rows")
    assert got.dtype == np.dtype(dtype)
    same(got, np.stack([want, want], axis=1))
    first, second = hvd.grouped_allgather([mine, of(RANK, (1,))])
    same(first, got.asnumpy())
    same(second, np.arange(1, SIZE + 1))
    assert hvd.grouped_allgather([]) == []

    counts = [rank + 1 for rank in range(SIZE)]
    rows = mx.nd.array(np.repeat(np.arange(SIZE), counts) * 10 + RANK, dtype=dtype)
    for splits in (counts, mx.nd.array(counts, dtype="int32")):
        got, received = hvd.alltoall(rows, splits=splits)
        same(got, [RANK * 10 + sender for sender in range(SIZE) for _ in range(RANK + 1)])
        same(received, [RANK + 1] * SIZE)
        assert received.dtype == np.int32
    same(hvd.alltoall(mx.nd.full((2 * SIZE,), RANK)), np.repeat(np.arange(SIZE), 2))

    rows = mx.nd.full((2 * SIZE + 1, 3), RANK + 1, dtype=dtype)
    got = hvd.reducescatter(rows, op=hvd.Sum)
    same(got, np.full((3 if RANK == 0 else 2, 3), TOTAL))
    got = hvd.grouped_reducescatter([rows, rows], hvd.Sum, prescale_factor=2.0)
    same(got[1], np.full((3 if RANK == 0 else 2, 3), 2 * TOTAL))


def test_a_rank_without_rows():
    splits = [0] * SIZE
    splits[0] = 2
    got, received = hvd.alltoall(mx.nd.ones((2, 3)), splits=splits)
    assert got.shape == (2 * SIZE if RANK == 0 else 0, 3)
    same(received, [2 if RANK == 0 else 0] * SIZE)


def test_bad_arguments():
    mine = mx.nd.ones((3,))
    with pytest.raises(AssertionError, match="only"):
        hvd.reducescatter(mine, op=hvd.Max)
    with mx.util.np_shape(True):
        scalar = mx.nd.ones(())
    with pytest.raises(ValueError, match=r"^reducescatter does not support scalar inputs"):
        hvd.reducescatter(scalar)
    with pytest.raises(ValueError, match=r"^groued_reducescatter does not support scalar inputs"):
        hvd.grouped_reducescatter([mine, scalar])
    for wrong in (np.ones(3), mine.tostype("row_sparse")):
        for call in (hvd.allreduce, hvd.allgather, lambda a: hvd.broadcast(a, 0), hvd.alltoall):
            with pytest.raises(AssertionError, match="dense mxnet"):
                call(wrong)
    with pytest.raises(TypeError, match="not registered"):
        hvd.allreduce(mine, process_set=ProcessSet([0]))
    with pytest.raises(mx.MXNetError, match="root rank"):
        hvd.broadcast_(mine, SIZE).wait_to_read()
    with pytest.raises(mx.MXNetError, match="splits"):
        hvd.alltoall(mine, splits=[1.5])


def test_mistakes_are_raised_where_the_result_is_read():
    text = "bool tensors cannot be averaged"
    got = hvd.allreduce(mx.nd.array([True], dtype=bool), op=hvd.Average)
    with pytest.raises(mx.MXNetError, match=text):
        got.asnumpy()
    same(hvd.allreduce(mx.nd.ones((2,)), op=hvd.Sum), [SIZE, SIZE])


@several
def test_ranks_that_disagree():
    mine = mx.nd.ones((2 + RANK % 2,))
    got = hvd.allreduce(mine, name="shapes")
    later = got + 1
    with pytest.raises(
        mx.MXNetError, match=r"Mismatched ALLREDUCE tensor shapes.*horovod_allreduce\.shapes"
    ):
        later.asnumpy()
    with pytest.raises(mx.MXNetError, match=r"Mismatched .*horovod_grouped_allreduce\.kinds"):
        dtype = ["float32", "float64"][RANK % 2]
        hvd.grouped_allreduce([mine, of(RANK, (2,), dtype)], name="kinds")[1].asnumpy()
    with pytest.raises(mx.MXNetError, match=r"horovod_allgather\.columns"):
        hvd.allgather(mx.nd.ones((2, 2 + RANK % 2)), name="columns")
    with pytest.raises(mx.MXNetError, match=r"horovod_reducescatter\.columns"):
        hvd.reducescatter(mx.nd.ones((2, 2 + RANK % 2)), name="columns")
    mx.nd.waitall()
    same(hvd.allreduce(mx.nd.ones((2,)), op=hvd.Sum), [SIZE, SIZE])


@several
def test_an_array_that_failed_can_be_used_again():
    mine = mx.nd.ones((2 + RANK % 2,))
    hvd.allreduce_(mine)
    with pytest.raises(mx.MXNetError, match="Mismatched"):
        mine.wait_to_read()
    mine[:] = 3
    assert mine.asnumpy().tolist() == [3.0] * (2 + RANK % 2)


def test_unnamed_operations_are_numbered_together(monkeypatch):
    names = []
    monkeypatch.setattr(
        _operations, "push", lambda _, prefix, name, *a, **k: names.append((prefix, name))
    )
    mine = mx.nd.ones((1,))
    hvd.allreduce_(mine)
    hvd.grouped_allreduce_([mine, mine.copy()])
    hvd.broadcast_(mine, 0)
    hvd.broadcast_(mine, 0, name="x")
    first = int(names[0][1].removeprefix("noname."))
    assert names == [
        ("horovod_allreduce", f"noname.{first}"),
        ("horovod_grouped_allreduce", f"noname.{first + 1}"),
        ("horovod_broadcast", f"noname.{first + 2}"),
        ("horovod_broadcast", "x"),
    ]


def test_arrays_of_a_gpu_go_through_host_memory(monkeypatch):
    """No GPU here: another CPU context stands for it."""
    for module in (_arrays, _operations):
        monkeypatch.setattr(module, "on_gpu", lambda array: array.context == mx.cpu(1))
    mine = mx.nd.full((3,), RANK + 1, ctx=mx.cpu(1))
    got = hvd.allreduce(mine, op=hvd.Sum)
    assert got.context == mx.cpu(1)
    same(got, np.full(3, TOTAL))
    same(mine, np.full(3, RANK + 1))
    hvd.allreduce_(mine, op=hvd.Sum)
    same(mine, np.full(3, TOTAL))
    mine[:] = RANK
    same(hvd.allgather(mine), np.repeat(np.arange(SIZE), 3))
    same(hvd.broadcast(mine, SIZE - 1), np.full(3, SIZE - 1))
    same(hvd.broadcast_(mine, SIZE - 1), np.full(3, SIZE - 1))


def test_contexts_of_ranks():
    mine = mx.nd.full((3,), RANK + 1, ctx=mx.cpu(RANK))
    got = hvd.allreduce(mine, op=hvd.Sum)
    assert got.context == hvd.allgather(mine).context == mx.cpu(RANK)
    same(got, np.full(3, TOTAL))


def test_process_sets():
    hvd.shutdown()
    hvd.init(process_sets="dynamic")
    try:
        last = hvd.add_process_set([SIZE - 1]) if SIZE > 1 else hvd.global_process_set
        mine = of(RANK, (3,))
        got = hvd.allreduce(mine, op=hvd.Sum, process_set=last)
        if RANK == SIZE - 1:
            same(got, mine.asnumpy())
            same(hvd.broadcast(mine, SIZE - 1, process_set=last), mine.asnumpy())
            same(hvd.allgather(mine, process_set=last), mine.asnumpy())
            same(hvd.reducescatter(mine, process_set=last), mine.asnumpy())
        else:
            with pytest.raises(mx.MXNetError, match="process set"):
                got.asnumpy()
            with pytest.raises(mx.MXNetError, match="process set"):
                hvd.allgather(mine, process_set=last)
        hvd.allreduce(mine).wait_to_read()
        if SIZE > 1:
            assert hvd.remove_process_set(last)
    finally:
        hvd.shutdown()
        hvd.init()


def test_objects():
    assert hvd.broadcast_object({"rank": RANK}, root_rank=SIZE - 1) == {"rank": SIZE - 1}
    assert hvd.broadcast_object("x" if RANK == 0 else None) == "x"  # types differ, without a name
    assert hvd.allgather_object([RANK] * RANK) == [[rank] * rank for rank in range(SIZE)]


def test_join():
    """A rank whose operations still wait in the engine takes part in them first."""
    for i in range(3 - RANK if SIZE > 1 else 3):
        mine = hvd.allreduce(mx.nd.ones((4,)), op=hvd.Sum, name=f"batch{i}")
    last = hvd.join()
    assert 0 <= last < SIZE
    assert mine.asnumpy()[0] >= 1


def test_before_init():
    hvd.shutdown()
    try:
        got = hvd.allreduce(mx.nd.ones((2,)))
        with pytest.raises(
            mx.MXNetError, match=r"Horovod has not been initialized; use hvd\.init\(\)\."
        ):
            got.asnumpy()
        with pytest.raises(mx.MXNetError, match="Horovod has not been initialized"):
            hvd.allgather(mx.nd.ones((2,)))
        with pytest.raises(mx.MXNetError, match="Horovod has not been initialized"):
            hvd.broadcast(mx.nd.ones((2,)), 0).asnumpy()
    finally:
        hvd.init()


def test_public_names():
    text = """init shutdown is_initialized start_timeline stop_timeline size local_size cross_size rank local_rank
    cross_rank mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built nccl_built ddl_built ccl_built
    cuda_built rocm_built ProcessSet global_process_set add_process_set remove_process_set Average Sum Adasum Min Max
    Product allreduce allreduce_ grouped_allreduce grouped_allreduce_ allgather grouped_allgather broadcast broadcast_
    alltoall reducescatter grouped_reducescatter broadcast_object allgather_object broadcast_parameters Compression
    DistributedOptimizer DistributedTrainer"""
    names = text.split()
    assert [name for name in names if not hasattr(hvd, name)] == []
    assert set(names) <= set(hvd.__all__)
    documented_names.check("horovod.mxnet")
    assert mpi_ops.allreduce is hvd.allreduce
    # Arrays go through host memory.
    assert hvd.nccl_built() == mpi_ops.nccl_built() == 0
    assert mpi_ops.handle_average_backwards_compatibility(None, None) == hvd.Average
    assert mpi_ops.MPI_MXNET_LIB_CTYPES.horovod_size() == mpi_ops._basics.size() == SIZE
