"""`horovod.torch` with tensors on GPUs: every operation, type and layout, and where results appear."""

import pytest
import torch
from devices import (
    GpuTensor,
    Stream,
    communicators,
    number_of_gpus,
    on_gpu,
    stream,
    wait_for_communicators,
)

import horovod.torch as hvd
from horovod.common.process_sets import ProcessSet

hvd.init()
SIZE, RANK = hvd.size(), hvd.rank()
DEVICE = hvd.local_rank() % number_of_gpus()
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
several = pytest.mark.skipif(SIZE == 1, reason="needs two ranks")


def values(rank, shape=(5, 3), dtype=torch.float32):
    count = int(torch.tensor(shape).prod()) if shape else 1
    return (torch.arange(count) % 5 + rank + 1).reshape(shape).to(dtype)


def own(shape=(5, 3), dtype=torch.float32):
    return on_gpu(values(RANK, shape, dtype), DEVICE)


def everyones(shape=(5, 3), dtype=torch.float32):
    return torch.stack([values(rank, shape, dtype) for rank in range(SIZE)])


def total(shape=(5, 3), dtype=torch.float32):
    return everyones(shape, torch.float64).sum(0).to(dtype)


def same(got, want):
    assert isinstance(got, GpuTensor)
    assert got.device == torch.device("cuda", DEVICE)
    host = got.cpu()
    assert host.dtype == want.dtype
    assert host.shape == want.shape
    assert torch.equal(host, want), (host, want)


# -- allreduce


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
@pytest.mark.parametrize("in_place", [False, True])
def test_allreduce(dtype, in_place):
    tensor = own(dtype=dtype)
    for op, want in (
        (hvd.Sum, total(dtype=dtype)),
        (hvd.Min, values(0, dtype=dtype)),
        (hvd.Max, values(SIZE - 1, dtype=dtype)),
        (hvd.Product, everyones(dtype=torch.float64).prod(0).to(dtype)),
    ):
        operand = tensor.clone() if in_place else tensor
        name = f"allreduce.{dtype}.{in_place}.{op}"
        result = (hvd.allreduce_ if in_place else hvd.allreduce)(operand, op=op, name=name)
        assert (result is operand) == in_place
        same(result, want)
    same(tensor, values(RANK, dtype=dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_average_and_factors(dtype):
    wide = total(dtype=torch.float64)
    same(hvd.allreduce(own(dtype=dtype)), (wide / SIZE).to(dtype))
    scaled = hvd.allreduce(own(dtype=dtype), op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    same(scaled, (wide * 2).to(dtype))


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_average_and_factors_of_integers(dtype):
    want = total(dtype=torch.int64).div(SIZE, rounding_mode="trunc").to(dtype)
    same(hvd.allreduce(own(dtype=dtype)), want)
    same(
        hvd.allreduce_(own(dtype=dtype), op=hvd.Sum, postscale_factor=2.0), (total() * 2).to(dtype)
    )


def test_bool():
    tensor = on_gpu(torch.tensor([True, False, RANK == 0]), DEVICE)
    for op, last in (
        (hvd.Max, True),
        (hvd.Sum, True),
        (hvd.Min, SIZE == 1),
        (hvd.Product, SIZE == 1),
    ):
        same(hvd.allreduce(tensor, op=op), torch.tensor([True, False, last]))


def test_complex_numbers_conjugated_too():
    tensor = on_gpu(torch.complex(values(RANK), values(RANK)), DEVICE)
    same(hvd.allreduce(tensor, op=hvd.Sum), torch.complex(total(), total()))
    same(hvd.allreduce(tensor.conj(), op=hvd.Sum), torch.complex(total(), -total()))


@pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 3), (70_001,)], ids=str)
def test_shapes(shape):
    same(hvd.allreduce(own(shape), op=hvd.Sum), total(shape))
    same(hvd.allreduce_(own(shape), op=hvd.Sum), total(shape))
    same(hvd.broadcast(own(shape), SIZE - 1), values(SIZE - 1, shape))


def test_adasum():
    # On one host: what NCCL's ranks average, others combine as the CPU does. Of several: test_gpu_adasum.py.
    host = hvd.allreduce(values(RANK), op=hvd.Adasum, name="adasum.host")
    want = total() / SIZE if hvd.nccl_built() else host
    got = hvd.allreduce(own(), op=hvd.Adasum, name="adasum")
    torch.testing.assert_close(got.cpu(), want)
    assert isinstance(got, GpuTensor)
    tensors = [own(), own()]
    hvd.grouped_allreduce_(tensors, op=hvd.Adasum, name="adasum.group")
    for tensor in tensors:
        torch.testing.assert_close(tensor.cpu(), want)


# Of dimensions, in memory.
ORDERS = [(0, 1, 2, 3), (0, 2, 3, 1), (3, 2, 1, 0), (0, 1, 3, 2)]


def in_order(tensor, order):
    """The same values, laid out so."""
    places = [order.index(dim) for dim in range(len(order))]
    return on_gpu(tensor.permute(order).contiguous().permute(places), DEVICE)


def test_another_order_in_memory_on_each_rank():
    shape = (2, 3, 4, 5)
    for step in range(len(ORDERS)):  # also when it is known
        order = ORDERS[(RANK + step) % 4]
        tensors = [in_order(values(RANK, shape), ORDERS[(i * RANK + step) % 4]) for i in range(3)]
        strides = [tensor.stride() for tensor in tensors]
        hvd.allreduce_(tensors[1], op=hvd.Sum, name="orders")
        same(tensors[1], total(shape))
        hvd.grouped_allreduce_(tensors[::2], op=hvd.Sum, name="orders.group")
        same(tensors[0], total(shape))
        same(tensors[2], total(shape))
        assert [tensor.stride() for tensor in tensors] == strides
        mine = in_order(values(RANK, shape), order)
        same(hvd.allreduce(mine, op=hvd.Sum, name="orders.new"), total(shape))
        same(hvd.allgather(mine, name="orders.gather"), everyones(shape).flatten(0, 1))
        same(hvd.broadcast_(mine, SIZE - 1, name="orders.root"), values(SIZE - 1, shape))


def test_strided_tensors_are_written_where_they_are():
    columns = own((6, 4)).t()
    same(hvd.allreduce_(columns, op=hvd.Sum), total((6, 4)).t())
    picture = own((2, 3, 4, 5)).to(memory_format=torch.channels_last)
    address = picture.data_ptr()
    same(hvd.allreduce_(picture, op=hvd.Sum), total((2, 3, 4, 5)))
    assert picture.data_ptr() == address
    assert picture.is_contiguous(memory_format=torch.channels_last)
    every_second = own((8, 3))[::2]
    same(hvd.allreduce_(every_second, op=hvd.Sum), total((8, 3))[::2])
    same(hvd.broadcast_(own((6, 4)).t(), 0), values(0, (6, 4)).t())


@pytest.mark.parametrize("in_place", [False, True])
def test_groups(in_place):
    tensors = [
        own((n + 1, 2), dtype) for n, dtype in enumerate([*FLOATS, torch.int32, torch.int16])
    ]
    wants = [total(t.shape, t.dtype) for t in tensors]
    call = hvd.grouped_allreduce_ if in_place else hvd.grouped_allreduce
    results = call(tensors, op=hvd.Sum, name=f"group.{in_place}")
    assert isinstance(results, tuple) or not in_place
    for tensor, result, want in zip(tensors, results, wants, strict=True):
        assert (tensor is result) == in_place
        same(result, want)


def test_members_of_a_group_that_share_memory():
    tensor = own((4, 4))
    results = hvd.grouped_allreduce_([tensor, tensor[1:3]], op=hvd.Sum)
    same(results[0], total((4, 4)))


def test_many_in_flight_are_fused():
    tensors = [own((n % 7 + 1, 3)) for n in range(60)]
    handles = [hvd.allreduce_async_(t, op=hvd.Sum, name=f"many.{n}") for n, t in enumerate(tensors)]
    for handle, tensor in zip(handles, tensors, strict=True):
        assert hvd.synchronize(handle) is tensor
        same(tensor, total(tuple(tensor.shape)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_compression(dtype):
    same(
        hvd.allreduce(own(dtype=dtype), op=hvd.Sum, compression=hvd.Compression.fp16),
        total(dtype=dtype),
    )


# -- the others


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS + [torch.bool, torch.complex64], ids=str)
def test_allgather(dtype):
    rows = [values(rank, (rank + 1, 3), dtype) for rank in range(SIZE)]
    same(hvd.allgather(own((RANK + 1, 3), dtype)), torch.cat(rows))
    same(
        hvd.allgather(own((2, 3), dtype)),
        torch.cat([values(r, (2, 3), dtype) for r in range(SIZE)]),
    )


def test_allgather_of_nothing():
    rows = 0 if RANK % 2 == 0 else 2
    want = torch.cat([values(r, (r % 2 * 2, 3)) for r in range(SIZE)])
    same(hvd.allgather(own((rows, 3))), want)
    same(hvd.allgather(own((0, 3))), torch.empty(0, 3))


def test_allgather_of_bytes_that_nobody_computes_with():
    eighths = values(RANK).to(torch.float8_e4m3fn)
    want = torch.cat([values(r).to(torch.float8_e4m3fn) for r in range(SIZE)])
    got = hvd.allgather(on_gpu(eighths, DEVICE))
    assert torch.equal(got.cpu().view(torch.uint8), want.view(torch.uint8))


def test_grouped_allgather():
    results = hvd.grouped_allgather([own((RANK + 1, 2)), own((3,), torch.int64)])
    same(results[0], torch.cat([values(r, (r + 1, 2)) for r in range(SIZE)]))
    same(results[1], torch.cat([values(r, (3,), torch.int64) for r in range(SIZE)]))


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS + [torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize("root", range(SIZE))
def test_broadcast(dtype, root):
    tensor = own(dtype=dtype)
    same(hvd.broadcast(tensor, root), values(root, dtype=dtype))
    same(tensor, values(RANK, dtype=dtype))
    assert hvd.broadcast_(tensor, root) is tensor
    same(tensor, values(root, dtype=dtype))


@pytest.mark.parametrize("kind", ["list", "host", "gpu", "none"])
def test_alltoall(kind):
    # Rank r sends r + d rows to rank d.
    counts = [RANK + d for d in range(SIZE)] if kind != "none" else [2] * SIZE
    splits = {
        "list": counts,
        "host": torch.tensor(counts),
        "gpu": on_gpu(torch.tensor(counts, dtype=torch.int32), DEVICE),
        "none": None,
    }[kind]
    sent = sum(counts)
    answer = hvd.alltoall(own((sent, 2)), splits)
    output, received = answer if kind != "none" else (answer, None)
    rows = []
    for sender in range(SIZE):
        theirs = [sender + d for d in range(SIZE)] if kind != "none" else [2] * SIZE
        start = sum(theirs[:RANK])
        rows.append(values(sender, (sum(theirs), 2))[start : start + theirs[RANK]])
    same(output, torch.cat(rows))
    if kind == "gpu":
        same(received, torch.tensor([s + RANK for s in range(SIZE)], dtype=torch.int32))
    elif kind != "none":
        assert received.tolist() == [s + RANK for s in range(SIZE)]
        assert received.device.type == "cpu"


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("rows", [2 * SIZE, 2 * SIZE + 1, 1])
@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average], ids=["sum", "average"])
def test_reducescatter(dtype, rows, op):
    result = hvd.reducescatter(own((rows, 3), dtype), op=op)
    counts = [rows // SIZE + (r < rows % SIZE) for r in range(SIZE)]
    start = sum(counts[:RANK])
    wide = total((rows, 3), torch.float64)
    if op == hvd.Average:
        wide = wide / SIZE if dtype.is_floating_point else wide.div(SIZE, rounding_mode="trunc")
    same(result, wide.to(dtype)[start : start + counts[RANK]])


def test_grouped_reducescatter():
    tensors = [own((SIZE, 2)), own((2 * SIZE, 3))]
    first, second = hvd.grouped_reducescatter(tensors, op=hvd.Sum)
    same(first, total((SIZE, 2))[RANK : RANK + 1])
    same(second, total((2 * SIZE, 3))[2 * RANK : 2 * RANK + 2])


def test_objects_travel_beside_tensors():
    assert hvd.broadcast_object({"rank": RANK}, SIZE - 1) == {"rank": SIZE - 1}
    assert hvd.allgather_object(RANK) == list(range(SIZE))


# -- gradients


def test_gradients():
    def leaf(shape):
        return own(shape).requires_grad_(True)

    tensor = leaf((4, 2))
    hvd.allreduce(tensor, op=hvd.Sum).sum().backward()
    same(tensor.grad, torch.full((4, 2), float(SIZE)))
    tensor = leaf((RANK + 1, 2))
    hvd.allgather(tensor).sum().backward()
    same(tensor.grad, torch.ones(RANK + 1, 2))
    tensor = leaf((4, 2))
    hvd.broadcast(tensor, 0).sum().backward()
    same(tensor.grad, torch.ones(4, 2) if RANK == 0 else torch.zeros(4, 2))
    tensor = leaf((2 * SIZE, 2))
    hvd.alltoall(tensor).sum().backward()
    same(tensor.grad, torch.ones(2 * SIZE, 2))
    tensor = leaf((2 * SIZE, 2))
    hvd.reducescatter(tensor, op=hvd.Sum).sum().backward()
    same(tensor.grad, torch.full((2 * SIZE, 2), float(SIZE)))
    tensors = [leaf((2, 2)), leaf((3,))]
    sum(t.sum() for t in hvd.grouped_allreduce(tensors, op=hvd.Average)).backward()
    same(tensors[1].grad, torch.ones(3))


# -- sets, join, streams, handles


@several
def test_process_sets():
    same(hvd.allreduce(own(), op=hvd.Sum, name="before"), total())
    before = communicators()
    odd = hvd.add_process_set(ProcessSet(range(1, SIZE, 2)))
    everybody_but_last = hvd.add_process_set(ProcessSet(range(SIZE - 1)))
    try:
        for chosen in (odd, everybody_but_last):
            if chosen.included():
                ranks = chosen.ranks
                same(
                    hvd.allreduce(own(), op=hvd.Sum, process_set=chosen, name="in a set"),
                    sum(values(r) for r in ranks),
                )
                gathered = hvd.allgather(own((RANK + 1, 2)), process_set=chosen, name="of a set")
                same(gathered, torch.cat([values(r, (r + 1, 2)) for r in ranks]))
        same(hvd.allreduce(own(), op=hvd.Sum, name="of all"), total())
    finally:
        hvd.remove_process_set(odd)
        hvd.remove_process_set(everybody_but_last)
    wait_for_communicators(before)


@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average, hvd.Min, hvd.Max, hvd.Product])
def test_join(op):
    # Rank r has r + 1 steps. A rank that has left counts for the average only, where each sample keeps its weight.
    for step in range(RANK + 1):
        present = [values(rank, dtype=torch.float64) for rank in range(step, SIZE)]
        stacked = torch.stack(present)
        want = {
            hvd.Sum: stacked.sum(0),
            hvd.Average: stacked.sum(0) / SIZE,
            hvd.Min: stacked.amin(0),
            hvd.Max: stacked.amax(0),
            hvd.Product: stacked.prod(0),
        }[op]
        got = hvd.allreduce(own(dtype=torch.float64), op=op, name=f"join.{op}.{step}")
        assert torch.allclose(got.cpu(), want, rtol=1e-12, atol=0)
    assert hvd.join() == SIZE - 1


def test_work_on_other_streams():
    """Each call's stream is ordered with the operation; what is made for results belongs to that stream."""
    first, second = Stream(DEVICE), Stream(DEVICE)
    with stream(first):
        gathered = hvd.allgather_async(own((RANK + 1, 2)), name="stream.gather")
        reduced = hvd.allreduce_async_(own(), op=hvd.Sum, name="stream.reduce")
        same(hvd.synchronize(gathered), torch.cat([values(r, (r + 1, 2)) for r in range(SIZE)]))
    with stream(second):
        same(hvd.synchronize(reduced), total())


def test_poll_and_handles():
    tensor = own()
    handle = hvd.allreduce_async_(tensor, op=hvd.Sum, name="polled")
    while not hvd.poll(handle):
        pass
    assert hvd.synchronize(handle) is tensor
    assert hvd.synchronize(handle) is None
    with pytest.raises(ValueError, match=f"Handle {handle} was not created or has been cleared"):
        hvd.poll(handle)


def test_what_nobody_waits_for_stays_alive_until_it_has_ended():
    for n in range(20):
        hvd.allreduce_async_(own((1000,)), op=hvd.Sum, name=f"forgotten.{n}")
        hvd.allgather_async(own((100,)), name=f"forgotten.gather.{n}")
    same(hvd.allreduce(own(), op=hvd.Sum, name="after the forgotten"), total())


def test_results_are_dropped_at_once():
    for n in range(20):
        hvd.allgather(own((100,)), name=f"dropped.{n}")
        hvd.allreduce(own((100,)), name=f"dropped.sum.{n}")
