"""Others beside Horovod in the same processes: a user of NCCL, `torch.distributed`, another current device."""

import os
import tempfile
from contextlib import contextmanager

import pytest
import torch
from devices import IS_REAL, Stream, current_stream, number_of_gpus, on_gpu, stream

import horovod.torch as hvd
from horovod._core import NCCL_SHARES_GPUS_SINCE as SINCE

if not IS_REAL:
    from double_streams import contexts
    from other_nccl import OtherUser, call, current_context, current_device, unique_id

hvd.init()
SIZE, RANK = hvd.size(), hvd.rank()
DEVICE = hvd.local_rank() % number_of_gpus()
ELEMENTS = 1000
only_double = pytest.mark.skipif(IS_REAL, reason="calls the double's functions")


def ones():
    return on_gpu(torch.ones(ELEMENTS), DEVICE)


def is_sum(tensor):
    return torch.equal(tensor.cpu(), torch.full((ELEMENTS,), float(SIZE)))


@only_double
def test_another_user_of_nccl_takes_turns():
    """The device comes to rest in between, as by `torch.cuda.synchronize()`: nothing else orders the two."""
    with current_device(DEVICE):
        other = OtherUser(RANK, SIZE, hvd.broadcast_object(unique_id() if RANK == 0 else None))
        side = Stream(DEVICE)
        for step in range(4):
            ours, its = ones(), ones()
            gathered = hvd.allgather_async(ours, name=f"turns.gathered.{step}")
            summed = hvd.allreduce_async_(ours.clone(), op=hvd.Sum, name=f"turns.summed.{step}")
            ours, gathered = hvd.synchronize(summed), hvd.synchronize(gathered)
            call("cuCtxSynchronize")
            other.all_reduce_(its, side)
            call("cuCtxSynchronize")
            assert is_sum(ours)
            assert is_sum(its)
            assert gathered.cpu().tolist() == [1.0] * (SIZE * ELEMENTS)
        other.close()
    assert is_sum(hvd.allreduce(ones(), op=hvd.Sum, name="turns.last"))


@contextmanager
def process_group(backend):
    """In the block `torch.distributed` is there, over this."""
    folder = hvd.broadcast_object(tempfile.mkdtemp())
    store = torch.distributed.FileStore(os.path.join(folder, backend), SIZE)
    torch.distributed.init_process_group(backend, store=store, rank=RANK, world_size=SIZE)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.skipif(not IS_REAL, reason="PyTorch's NCCL needs a GPU")
def test_torch_distributed_over_nccl_takes_turns():
    if hvd.local_size() > number_of_gpus() and torch.cuda.nccl.version() < SINCE:
        pytest.skip("this NCCL refuses two ranks on one GPU")
    with torch.cuda.device(DEVICE), process_group("nccl"):
        for step in range(4):
            ours, theirs = ones(), ones()
            hvd.allreduce_(ours, op=hvd.Sum, name=f"beside nccl.{step}")
            torch.cuda.synchronize()
            torch.distributed.all_reduce(theirs)
            torch.cuda.synchronize()
            assert is_sum(ours)
            assert is_sum(theirs)


def test_torch_distributed_over_gloo_in_any_order(monkeypatch):
    """It works on the CPU: the two may wait for each other's ranks in different orders."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with process_group("gloo"):
        for step in range(6):
            ours, theirs = ones(), torch.ones(ELEMENTS)
            began = {}

            def begin_theirs(tensor=theirs, to=began):
                to["theirs"] = torch.distributed.all_reduce(tensor, async_op=True)

            def begin_ours(tensor=ours, to=began, step=step):
                name = f"beside gloo.{step}"
                to["ours"] = hvd.allreduce_async_(tensor, op=hvd.Sum, name=name)

            order = [begin_theirs, begin_ours]
            for begin in order if (RANK + step) % 2 else reversed(order):
                begin()
            if RANK % 2:
                began["theirs"].wait()
            hvd.synchronize(began["ours"])
            began["theirs"].wait()
            assert is_sum(ours)
            assert is_sum(theirs)


@only_double
@pytest.mark.parametrize("operation", [hvd.allgather, hvd.alltoall])
def test_memory_for_results_makes_no_context_on_other_devices(operation):
    """It is asked for by a thread of the core's, whose current device is another one."""
    contexts.clear()
    assert operation(on_gpu(torch.ones(SIZE), DEVICE)).cpu().tolist().count(1.0) >= SIZE
    assert contexts == {DEVICE}


OPERATIONS = {
    "allreduce_": lambda t: hvd.allreduce_async_(t, op=hvd.Sum, name="elsewhere"),
    "allreduce": lambda t: hvd.allreduce_async(t, op=hvd.Sum, name="elsewhere"),
    "allgather": lambda t: hvd.allgather_async(t, name="elsewhere"),
    "broadcast_": lambda t: hvd.broadcast_async_(t, 0, name="elsewhere"),
    "reducescatter": lambda t: hvd.reducescatter_async(t, op=hvd.Sum, name="elsewhere"),
}


@only_double
@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_current_device_is_not_the_tensors(operation):
    """Its stream is waited for, not the current device's, on which nothing comes to an end meanwhile."""
    elsewhere, side = (DEVICE + 1) % number_of_gpus(), Stream(DEVICE)
    tensor, values = on_gpu(torch.zeros(SIZE * 3), DEVICE), torch.ones(SIZE * 3)
    write = (side.cuda_stream, tensor.data_ptr(), values.data_ptr(), values.nbytes)
    with current_device(elsewhere), current_stream(elsewhere).paused(), stream(side):
        context = current_context()
        with side.paused():
            # Nobody waits for it but the stream's next.
            call("double_stream_write", *write)
            handle = OPERATIONS[operation](tensor)
        result = hvd.synchronize(handle)
        assert current_context() == context
        assert result.device == torch.device("cuda", DEVICE)
        want = SIZE if "reduce" in operation else 1
        assert set(result.cpu().tolist()) == {float(want)}
