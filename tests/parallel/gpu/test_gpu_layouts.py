"""Every operation on device tensors of every type, without elements, and with elements apart."""

import pytest
import torch
from devices import GpuTensor, number_of_gpus, on_gpu

import horovod.torch as hvd

hvd.init()
SIZE, RANK = hvd.size(), hvd.rank()
DEVICE = hvd.local_rank() % number_of_gpus()
ROWS = 2 * SIZE
TYPES = [torch.bfloat16, torch.float16, torch.bool, torch.int16, torch.uint8, torch.float32]

LAYOUTS = {
    "dense": lambda t: t,
    "transposed": lambda t: t.t().contiguous().t(),
    "every second": lambda t: t.repeat_interleave(2, 0)[::2],
    "columns": lambda t: torch.cat([t, t], 1)[:, : t.shape[1]],
    "without columns": lambda t: t[:, :0],
    "without rows": lambda t: t[:0],
}


def values(rank, dtype):
    return (torch.arange(ROWS * 3).reshape(ROWS, 3) % 3 + rank % 2).to(dtype)


def largest(every):
    return torch.stack(every).amax(0)


def own_part_of_the_sum(every):
    total = torch.stack(every).double().sum(0).to(every[0].dtype)
    return total.chunk(SIZE)[RANK] if len(total) else total


OPERATIONS = {
    "allreduce": (
        lambda t: hvd.allreduce(t, op=hvd.Max),
        largest,
    ),
    "allreduce_": (
        lambda t: hvd.allreduce_(t, op=hvd.Min),
        lambda every: torch.stack(every).amin(0),
    ),
    "grouped_allreduce": (
        lambda t: hvd.grouped_allreduce([t, t + t], op=hvd.Max)[0],
        largest,
    ),
    "grouped_allreduce_": (
        lambda t: hvd.grouped_allreduce_([t, t.clone()], op=hvd.Max)[0],
        largest,
    ),
    "allgather": (hvd.allgather, torch.cat),
    "grouped_allgather": (lambda t: hvd.grouped_allgather([t, t])[1], torch.cat),
    "broadcast": (lambda t: hvd.broadcast(t, SIZE - 1), lambda every: every[-1]),
    "broadcast_": (lambda t: hvd.broadcast_(t, SIZE - 1), lambda every: every[-1]),
    "alltoall": (
        hvd.alltoall,
        lambda every: torch.cat([t.chunk(SIZE)[RANK] if len(t) else t for t in every]),
    ),
    "reducescatter": (
        lambda t: hvd.reducescatter(t, op=hvd.Sum),
        own_part_of_the_sum,
    ),
    "grouped_reducescatter": (
        lambda t: hvd.grouped_reducescatter([t, t], op=hvd.Sum)[1],
        own_part_of_the_sum,
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_on_every_layout(operation, layout):
    call, expected = OPERATIONS[operation]
    for dtype in TYPES if layout == "dense" else TYPES[:1]:
        # The layout is made on the device: what is moved there is dense.
        tensor = LAYOUTS[layout](on_gpu(values(RANK, dtype), DEVICE))
        result = call(tensor)
        want = expected([LAYOUTS[layout](values(rank, dtype)) for rank in range(SIZE)])
        assert isinstance(result, GpuTensor)
        assert result.device == torch.device("cuda", DEVICE)
        assert result.dtype == dtype
        assert result.shape == want.shape
        assert torch.equal(result.cpu(), want), (operation, layout, dtype)
