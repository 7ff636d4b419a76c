"""Tensors on GPUs that a script lets go while operations on them are under way."""

import gc

import pytest
import torch
from devices import number_of_gpus, on_gpu

import horovod.torch as hvd

hvd.init()
SIZE = hvd.size()
DEVICE = hvd.local_rank() % number_of_gpus()
ROWS = 6 * SIZE

STARTS = {
    "allreduce_": lambda t, n: hvd.allreduce_async_(t, op=hvd.Sum, name=f"dropped.{n}"),
    "allreduce": lambda t, n: hvd.allreduce_async(t, op=hvd.Sum, name=f"dropped.{n}"),
    "allgather": lambda t, n: hvd.allgather_async(t, name=f"dropped.{n}"),
    "broadcast_": lambda t, n: hvd.broadcast_async_(t, 0, name=f"dropped.{n}"),
    "alltoall": lambda t, n: hvd.alltoall_async(t, name=f"dropped.{n}"),
    "reducescatter": lambda t, n: hvd.reducescatter_async(t, op=hvd.Sum, name=f"dropped.{n}"),
}


@pytest.mark.parametrize("waits", [True, False], ids=["waited for", "forgotten"])
@pytest.mark.parametrize("operation", STARTS)
def test_a_tensor_is_dropped_while_it_is_in_flight(operation, waits):
    """Its memory stays until nothing uses it: the double reports what does."""
    handles = []
    for n in range(8):
        tensor = on_gpu(torch.ones(ROWS, 100), DEVICE)
        handles.append(STARTS[operation](tensor, n))
        del tensor
        gc.collect()
        # An allocation now may get the released memory.
        on_gpu(torch.zeros(ROWS, 100), DEVICE)
    if waits:
        for handle in handles:
            # An alltoall without splits has one result, too.
            result = hvd.synchronize(handle)
            result = result[0] if isinstance(result, tuple) else result
            assert result.cpu().float().min() >= 1
    last = hvd.allreduce(on_gpu(torch.ones(3), DEVICE), op=hvd.Sum, name="last")
    assert last.cpu().tolist() == [SIZE] * 3
