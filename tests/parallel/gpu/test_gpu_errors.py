"""Bad input with tensors on GPUs: each a clear error, on every rank, and the job goes on."""

import os

import pytest
import torch
from devices import IS_REAL, IS_ROCM, Stream, module_on_gpu, number_of_gpus, on_gpu, stream

import horovod.torch as hvd

hvd.init()
SIZE, RANK = hvd.size(), hvd.rank()
DEVICE = hvd.local_rank() % number_of_gpus()
several = pytest.mark.skipif(SIZE == 1, reason="needs two ranks")


def still_works(name):
    result = hvd.allreduce(on_gpu(torch.ones(2), DEVICE), op=hvd.Sum, name=f"{name}.after")
    assert result.cpu().tolist() == [SIZE, SIZE]


def test_what_was_found():
    through_host_memory = os.environ.get("HOROVOD_GPU_OPERATIONS") == "HOST"
    assert hvd.nccl_built() == 0 if through_host_memory else hvd.nccl_built() >= 21800
    assert hvd.cuda_built() is not IS_ROCM
    assert hvd.rocm_built() is IS_ROCM


four_gpus = pytest.mark.skipif(number_of_gpus() < 4, reason="needs four GPUs")


@four_gpus
@pytest.mark.parametrize(
    "call",
    [
        hvd.grouped_allreduce,
        hvd.grouped_allreduce_,
        hvd.grouped_allgather,
        hvd.grouped_reducescatter,
    ],
)
def test_a_group_on_several_devices(call):
    here, there = on_gpu(torch.ones(SIZE), DEVICE), on_gpu(torch.ones(SIZE), 3)
    with pytest.raises(ValueError, match=f"must be on same device.*cuda:{DEVICE}.*cuda:3"):
        call([here, there])
    with pytest.raises(ValueError, match=f"must be on same device.*the CPU.*cuda:{DEVICE}"):
        call([torch.ones(SIZE), here])
    still_works(call.__name__)


@four_gpus
def test_a_tensor_on_another_device_than_before():
    still_works("first device")
    with pytest.raises(
        ValueError, match=rf"on GPU 3.*from GPU {DEVICE}.*torch.cuda.set_device\(hvd.local"
    ):
        hvd.allreduce(on_gpu(torch.ones(2), 3), name="elsewhere")
    with pytest.raises(ValueError, match=f"on GPU 3.*from GPU {DEVICE}"):
        hvd.allreduce_(on_gpu(torch.ones(2), 3), name="elsewhere in place")
    still_works("another device")


CALLS = {
    "allreduce": lambda t: hvd.allreduce_async(t, name="captured"),
    "allreduce_": lambda t: hvd.allreduce_async_(t, name="captured"),
    "grouped_allreduce": lambda t: hvd.grouped_allreduce_async([t], name="captured"),
    "grouped_allreduce_": lambda t: hvd.grouped_allreduce_async_([t], name="captured"),
    "allgather": lambda t: hvd.allgather_async(t, name="captured"),
    "grouped_allgather": lambda t: hvd.grouped_allgather_async([t], name="captured"),
    "broadcast_": lambda t: hvd.broadcast_async_(t, 0, name="captured"),
    "alltoall": lambda t: hvd.alltoall_async(t, name="captured"),
    "reducescatter": lambda t: hvd.reducescatter_async(t, name="captured"),
    "grouped_reducescatter": lambda t: hvd.grouped_reducescatter_async([t], name="captured"),
}


@pytest.mark.parametrize("operation", CALLS)
def test_every_operation_refuses_to_be_captured(operation):
    side, tensor = Stream(DEVICE), on_gpu(torch.ones(2 * SIZE), DEVICE)
    with stream(side), side.captured(), pytest.raises(RuntimeError) as refused:
        CALLS[operation](tensor)
    assert not isinstance(refused.value, hvd.HorovodInternalError)
    assert ".captured: The current stream is being captured" in str(refused.value)
    still_works("captured")


@several
@pytest.mark.skipif(IS_REAL, reason="a real capture would hold the pass itself")
def test_a_backward_pass_that_is_captured():
    """Its gradients cannot be reduced in the graph."""
    model = module_on_gpu(torch.nn.Linear(2, 1), DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    side = Stream(DEVICE)
    loss = model(on_gpu(torch.ones(1, 2), DEVICE)).sum()
    with stream(side), side.captured(), pytest.raises(RuntimeError, match="no_sync"):
        loss.backward()
    optimizer.zero_grad()
    still_works("captured pass")


def test_an_operation_in_a_capture():
    side, tensor = Stream(DEVICE), on_gpu(torch.ones(2), DEVICE)
    for call in (hvd.allreduce_async, hvd.allreduce_async_, hvd.allgather_async):
        with stream(side), side.captured(), pytest.raises(RuntimeError) as refused:
            call(tensor, name="captured")
        assert not isinstance(refused.value, hvd.HorovodInternalError)
        assert ".captured: The current stream is being captured" in str(refused.value)
        assert "no_sync" in str(refused.value)
    handle = hvd.allreduce_async(tensor, name="before a capture")
    with stream(side), side.captured(), pytest.raises(RuntimeError, match="being captured"):
        hvd.synchronize(handle)
    still_works("captured")


@several
def test_a_host_tensor_against_device_tensors():
    tensor = torch.ones(2) if RANK == 0 else on_gpu(torch.ones(2), DEVICE)
    with pytest.raises(hvd.HorovodInternalError, match="Mismatched ALLREDUCE CPU/GPU") as raised:
        hvd.allreduce(tensor, name="mixed")
    assert "CPU" in str(raised.value)
    assert "GPU" in str(raised.value)
    assert "rank 0 and rank 1" in str(raised.value)
    still_works("mixed")


@several
def test_shapes_that_differ():
    with pytest.raises(hvd.HorovodInternalError, match="Mismatched"):
        hvd.allreduce(on_gpu(torch.ones(RANK + 1), DEVICE), name="shapes")
    still_works("shapes")


def test_an_operator_without_a_meaning():
    with pytest.raises(ValueError, match="not supported for op"):
        hvd.allreduce(on_gpu(torch.ones(2, dtype=torch.bool), DEVICE), op=hvd.Average)
    with pytest.raises(ValueError, match="scalar"):
        hvd.reducescatter(on_gpu(torch.ones(()), DEVICE))


def test_a_tensor_that_got_other_memory():
    tensor = on_gpu(torch.ones(2), DEVICE)
    handle = hvd.allreduce_async_(tensor, op=hvd.Sum, name="moved")
    with torch._C.DisableTorchFunctionSubclass():
        tensor.data = on_gpu(torch.zeros(2), DEVICE)
    with pytest.raises(RuntimeError, match="other memory"):
        hvd.synchronize(handle)
    still_works("moved")
