"""Dense tensors whose dimensions lie in any order in memory: in place, with the same or another order on each rank."""

import pytest
import torch
from ops_support import FLOATS, check, reduced, sample, samples

import horovod.torch as hvd

SHAPE = (2, 3, 4, 5)
ORDERS = {
    "contiguous": (0, 1, 2, 3),
    "channels_last": (0, 2, 3, 1),
    "reversed": (3, 2, 1, 0),
    "transposed": (0, 1, 3, 2),
}


def laid_out(tensor, order):
    """The same values, with the dimensions in this order in memory."""
    places = [order.index(dim) for dim in range(len(order))]
    return tensor.permute(order).contiguous().permute(places).clone()


def mixed(rank):
    """Another order on each of up to four ranks."""
    return list(ORDERS.values())[rank % len(ORDERS)]


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8, torch.int64, torch.bool])
def test_one_order_on_all_ranks(order, dtype):
    everyone = samples(SHAPE, dtype)
    mine = laid_out(everyone[hvd.rank()], order)
    address, strides = mine.data_ptr(), mine.stride()
    for _ in range(3):  # also when it is known
        mine.copy_(everyone[hvd.rank()])
        hvd.allreduce_(mine, op=hvd.Sum, name=f"one.{order}.{dtype}")
        check(mine, reduced(hvd.Sum, everyone))
        assert (mine.data_ptr(), mine.stride()) == (address, strides)
    mine.copy_(everyone[hvd.rank()])
    hvd.broadcast_(mine, hvd.size() - 1)
    check(mine, everyone[-1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8])
def test_another_order_on_each_rank(dtype):
    for step in range(4):
        everyone = samples(SHAPE, dtype, salt=step)
        mine = laid_out(everyone[hvd.rank()], mixed(hvd.rank() + step))
        strides = mine.stride()
        hvd.allreduce_(mine, op=hvd.Sum, name=f"each.{dtype}")
        check(mine, reduced(hvd.Sum, everyone))
        assert mine.stride() == strides
        mine.copy_(everyone[hvd.rank()])
        hvd.broadcast_(mine, 0, name=f"each.{dtype}")
        check(mine, everyone[0])


def test_orders_that_change_from_step_to_step():
    everyone = samples(SHAPE, torch.float32)
    for step, differs in enumerate([False, False, True, True, False, False, True, False]):
        order = mixed(hvd.rank()) if differs else mixed(step)
        mine = laid_out(everyone[hvd.rank()], order)
        hvd.allreduce_(mine, op=hvd.Sum, name="changing")
        check(mine, reduced(hvd.Sum, everyone))


def test_some_ranks_with_gaps_and_some_without():
    everyone = samples((6, 8), torch.float32)
    mine = everyone[hvd.rank()]
    if hvd.rank() % 2 == 0:
        mine = torch.zeros(6, 16)[:, ::2].copy_(mine)
    else:
        mine = laid_out(mine, (1, 0))
    hvd.allreduce_(mine, op=hvd.Sum, name="gaps")
    check(mine, reduced(hvd.Sum, everyone))


@pytest.mark.parametrize("differs", [False, True])
def test_a_group_of_several_orders(differs):
    orders = list(ORDERS.values())
    everyone = [samples(SHAPE, torch.float32, salt=i) for i in range(4)]
    shift = hvd.rank() if differs else 0
    mine = [laid_out(all_[hvd.rank()], orders[(i + shift) % 4]) for i, all_ in enumerate(everyone)]
    results = hvd.grouped_allreduce_(mine, op=hvd.Sum, name=f"group.{differs}")
    assert all(result is tensor for result, tensor in zip(results, mine, strict=True))
    for tensor, all_ in zip(mine, everyone, strict=True):
        check(tensor, reduced(hvd.Sum, all_))


@pytest.mark.parametrize("other", [torch.t, torch.clone, lambda t: t, lambda t: t[1:]])
def test_a_group_of_tensors_that_share_memory(other):
    everyone = samples((4, 4), torch.float32)
    mine = everyone[hvd.rank()].clone()
    alias = other(mine)
    hvd.grouped_allreduce_([mine, alias], op=hvd.Sum)
    want = reduced(hvd.Sum, everyone)
    check(mine, want)
    check(alias, other(want))


def test_large_tensors_of_several_orders_beside_each_other():
    elements = (64, 96, 40)
    everyone = [sample(rank, elements, torch.float32) for rank in range(hvd.size())]
    orders = [(2, 1, 0), (1, 2, 0), (0, 1, 2)]
    handles = []
    for i in range(6):
        order = orders[(i + hvd.rank() * (i % 2)) % 3]
        mine = laid_out(everyone[hvd.rank()], order)
        handles.append((mine, hvd.allreduce_async_(mine, op=hvd.Average, name=f"large.{i}")))
    want = reduced(hvd.Average, everyone)
    for mine, handle in handles:
        assert hvd.synchronize(handle) is mine
        check(mine, want, exact=False)


def test_a_joined_rank_beside_several_orders():
    everyone = samples((3, 4), torch.float32)
    joined = hvd.size() - 1
    if hvd.rank() != joined or hvd.size() == 1:
        mine = laid_out(everyone[hvd.rank()], (1, 0) if hvd.rank() else (0, 1))
        hvd.allreduce_(mine, op=hvd.Sum, name="beside a join")
        check(mine, reduced(hvd.Sum, everyone[: max(joined, 1)]))
    hvd.join()


@pytest.mark.parametrize("differs", [False, True])
def test_adasum(differs):
    generator = torch.Generator().manual_seed(7)
    everyone = [torch.randn(5, 7, generator=generator) for _ in range(hvd.size())]
    want = hvd.allreduce(everyone[hvd.rank()], op=hvd.Adasum)
    mine = laid_out(everyone[hvd.rank()], (1, 0) if not differs or hvd.rank() else (0, 1))
    hvd.allreduce_(mine, op=hvd.Adasum)
    torch.testing.assert_close(mine, want)


def test_a_channels_last_model_trains_as_a_contiguous_one():
    def train(memory_format):
        torch.manual_seed(3)
        model = torch.nn.Sequential(
            torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Conv2d(4, 2, 3)
        ).double()
        model = model.to(memory_format=memory_format)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
        )
        for step in range(3):
            generator = torch.Generator().manual_seed(step * 10 + hvd.rank())
            x = torch.randn(2, 3, 8, 8, generator=generator, dtype=torch.float64)
            optimizer.zero_grad()
            model(x.to(memory_format=memory_format)).square().mean().backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    contiguous = train(torch.contiguous_format)
    # The same on all ranks, and another format on some.
    for chosen in (
        torch.channels_last,
        [torch.contiguous_format, torch.channels_last][hvd.rank() % 2],
    ):
        for got, want in zip(train(chosen), contiguous, strict=True):
            torch.testing.assert_close(got, want)
