"""Memory of operations in flight: scripts that give a tensor other memory meanwhile neither crash nor go unnoticed."""

import threading
import time

import pytest
import torch

import horovod.torch as hvd

ELEMS = 1 << 16
hvd.init()
TIMES = 1000 if hvd.size() == 3 else 100

OTHER_MEMORY = {
    "data": lambda x: setattr(x, "data", torch.zeros(1)),
    "set_": lambda x: x.set_(torch.zeros(3)),
    "set_to_nothing": lambda x: x.set_(),
}


def total():
    return hvd.size() * (hvd.size() + 1) / 2


def mine(elems=ELEMS):
    return torch.full((elems,), float(hvd.rank() + 1))


@pytest.mark.parametrize("variant", OTHER_MEMORY)
def test_a_tensor_that_gets_other_memory_is_an_error_and_the_result_is_in_the_old(variant):
    for i in range(TIMES):
        x = mine()
        if i % 2:
            x = torch.nn.Parameter(x, requires_grad=False)
        view = x[1:]
        handle = hvd.allreduce_async_(x, name="x", op=hvd.Sum)
        OTHER_MEMORY[variant](x)
        with pytest.raises(RuntimeError, match="got other memory"):
            hvd.synchronize(handle)
        assert bool((view == total()).all())


@pytest.mark.skipif(hvd.size() == 1, reason="nobody is waited for")
def test_a_tensor_that_gets_other_memory_by_another_thread_while_a_call_waits():
    swapped = torch.zeros(1)
    pending = hvd.mpi_ops._handle_map
    for _ in range(100):
        x = mine()
        view = x[:]

        def swap(x=x):
            while not pending:
                time.sleep(0)
            x.data = torch.zeros(1)
            hvd.broadcast_(swapped, 0, name="swapped")

        if hvd.rank() == 0:
            thread = threading.Thread(target=swap)
            thread.start()
            with pytest.raises(RuntimeError, match="got other memory"):
                hvd.allreduce_(x, name="waits", op=hvd.Sum)
            thread.join()
        else:
            hvd.broadcast_(swapped, 0, name="swapped")
            assert hvd.allreduce_(x, name="waits", op=hvd.Sum) is x
        assert bool((view == total()).all())


def test_nothing_else_has_to_hold_the_memory():
    for _ in range(TIMES):
        x = mine()
        handle = hvd.allreduce_async_(x, name="x", op=hvd.Sum)
        x.data = torch.zeros(1)
        filler = torch.zeros(ELEMS)  # gets the memory if it is free
        with pytest.raises(RuntimeError, match="got other memory"):
            hvd.synchronize(handle)
        assert not bool(filler.any())


def test_broadcasts_and_groups_own_what_they_write():
    for _ in range(100):
        x, y, z = mine(), mine(), mine(200).reshape(10, 20).t()
        views = [x[:], y[:]]
        handles = [
            hvd.broadcast_async_(x, 0, name="x"),
            hvd.grouped_allreduce_async_([mine(), y], name="y", op=hvd.Sum),
            hvd.allreduce_async_(z, name="z", op=hvd.Sum),
        ]
        for tensor in (x, y, z):
            tensor.data = torch.zeros(1)
        for handle in handles:
            with pytest.raises(RuntimeError, match="got other memory"):
                hvd.synchronize(handle)
        assert bool((views[0] == 1).all())
        assert bool((views[1] == total()).all())


def test_operations_with_results_of_their_own_read_what_they_were_given():
    n, rank = hvd.size(), hvd.rank()
    for _ in range(100):
        inputs = [mine(n * 1000) for _ in range(6)]
        a, b, c, d, e, f = inputs
        handles = [
            hvd.allreduce_async(a, name="a", op=hvd.Sum),
            hvd.grouped_allreduce_async([b], name="b", op=hvd.Sum),
            hvd.allgather_async(c, name="c"),
            hvd.broadcast_async(d, 0, name="d"),
            hvd.alltoall_async(e, name="e"),
            hvd.reducescatter_async(f, name="f", op=hvd.Sum),
        ]
        for tensor in inputs:
            tensor.data = torch.zeros(1)
        results = [hvd.synchronize(handle) for handle in handles]
        ranks = torch.arange(1.0, n + 1)
        assert bool((results[0] == total()).all())
        assert bool((results[1][0] == total()).all())
        assert torch.equal(results[2], ranks.repeat_interleave(n * 1000))
        assert bool((results[3] == 1).all())
        assert torch.equal(results[4][0], ranks.repeat_interleave(1000))
        assert bool((results[5] == total()).all()), rank


def test_a_tensor_that_becomes_smaller_keeps_its_memory():
    for _ in range(100):
        x = mine()
        handle = hvd.allreduce_async_(x, name="x", op=hvd.Sum)
        x.resize_(10)
        assert hvd.synchronize(handle) is x
        assert x.tolist() == [total()] * 10


@pytest.mark.parametrize("variant", ["grow", "empty", "share"])
def test_a_storage_that_is_resized_is_noticed(variant):
    # Nothing can keep the memory of a storage that gives it back, so this does it when nobody writes any more.
    for start in (
        lambda x: hvd.allreduce_async_(x, name="x", op=hvd.Sum),
        lambda x: hvd.grouped_allreduce_async_([x], name="x", op=hvd.Sum),
    ):
        x = mine()
        handle = start(x)
        while not hvd.poll(handle):
            time.sleep(0)
        if variant == "grow":
            x.resize_(ELEMS * 4)
        elif variant == "empty":
            x.untyped_storage().resize_(0)
        else:
            x.share_memory_()
        with pytest.raises(RuntimeError, match="got other memory"):
            hvd.synchronize(handle)


def test_tensors_without_elements_have_no_memory_to_lose():
    x = torch.zeros(0, 3)
    handle = hvd.allreduce_async_(x, name="x", op=hvd.Sum)
    x.data = torch.zeros(4)
    assert hvd.synchronize(handle) is x


def test_gradients_that_are_replaced_between_backward_and_step():
    for forget in (True, False):
        weight = torch.nn.Parameter(torch.zeros(1 << 17))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([weight], lr=1.0), named_parameters=[("weight", weight)]
        )
        if hvd.size() > 1:
            optimizer.wait_in_backward = False
        for _ in range(50):
            (weight * (hvd.rank() + 1.0)).sum().backward()
            if forget:
                weight.grad = None
                optimizer.step()
            else:
                weight.grad.data = torch.zeros(1 << 17)
                if hvd.size() > 1:
                    with pytest.raises(RuntimeError, match="got other memory"):
                        optimizer.step()
                optimizer.zero_grad()
        assert not bool(weight.any())
