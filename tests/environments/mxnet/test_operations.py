"""`horovod.mxnet` beyond tests/conformance: its engine, views, contexts, and what is raised where."""

import gc
import threading
import warnings

import mxnet as mx
import numpy as np
import pytest

import documented_names
import horovod.mxnet as hvd
from horovod.mxnet import _arrays, _operations, mpi_ops

hvd.init()
SIZE, RANK = hvd.size(), hvd.rank()
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


def test_average_is_deprecated_and_adasum_refused():
    mine = mx.nd.full((3,), RANK + 1)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        same(hvd.allreduce(mine, average=False), np.full(3, TOTAL))
    assert any(w.category is DeprecationWarning for w in seen)
    with pytest.raises(ValueError, match=r"The op parameter supersedes average\. Please"):
        hvd.allreduce(mine, average=True, op=hvd.Sum)
    with pytest.raises(AssertionError, match="Adasum"):
        hvd.allreduce(mine, op=hvd.Adasum)


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


def test_texts_of_bad_arguments():
    mine = mx.nd.ones((3,))
    with mx.util.np_shape(True):
        scalar = mx.nd.ones(())
    with pytest.raises(ValueError, match=r"^reducescatter does not support scalar inputs"):
        hvd.reducescatter(scalar)
    with pytest.raises(ValueError, match=r"^groued_reducescatter does not support scalar inputs"):
        hvd.grouped_reducescatter([mine, scalar])


def test_arrays_of_numpy_s_kind():
    same(hvd.allreduce(mx.np.array([1.0, RANK]), op=hvd.Sum), [SIZE, TOTAL - SIZE])
    same(hvd.allgather(mx.np.array([float(RANK)])), range(SIZE))


def test_a_name_may_be_a_number_and_a_group_empty():
    mine = of(RANK, (2, 3))
    assert hvd.broadcast_(mine, 0, name=3) is mine
    same(mine, of(0, (2, 3)).asnumpy())
    assert hvd.grouped_allgather([]) == []


@several
def test_what_follows_from_a_failure_raises_it_too():
    later = hvd.allreduce(mx.nd.ones((2 + RANK % 2,)), name="shapes") + 1
    text = r"Mismatched ALLREDUCE tensor shapes.*horovod_allreduce\.shapes"
    with pytest.raises(mx.MXNetError, match=text):
        later.asnumpy()
    mx.nd.waitall()


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
