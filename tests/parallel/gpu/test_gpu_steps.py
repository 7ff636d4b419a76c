"""A training step on GPUs never blocks the host; the number of events that it records."""

import os
from contextlib import nullcontext

import pytest
import torch
from devices import (
    IS_REAL,
    IS_ROCM,
    Stream,
    count,
    module_on_gpu,
    number_of_gpus,
    on_gpu,
    stream,
    without_waiting,
)

import horovod.torch as hvd
from horovod.common._reduction import Reduction
from horovod.torch import _gradient_sending

if not IS_REAL:
    from other_nccl import bytes_in_use

hvd.init()
SIZE, RANK = hvd.size(), hvd.rank()
DEVICE = hvd.local_rank() % number_of_gpus()
IS_STAGED = os.environ["HOROVOD_GPU_OPERATIONS"] == "HOST"
ROWS = 6
only_double = pytest.mark.skipif(IS_REAL, reason="only the double counts calls and can be held")


class Scaler(torch.amp.GradScaler):
    """PyTorch's for a GPU, which asks for a real one when it is made."""

    def __init__(self):
        super().__init__("cpu", init_scale=64.0, growth_interval=2)

    def _lazy_init_scale_growth_tracker(self, dev):
        super()._lazy_init_scale_growth_tracker(torch.device("cuda", DEVICE))


OPTIONS = {
    "plain": {},
    "two passes": {"backward_passes_per_step": 2},
    "groups": {"groups": 2},
    "fp16": {"compression": hvd.Compression.fp16},
    "fp16 in groups": {"compression": hvd.Compression.fp16, "groups": 2},
    "predivide": {"gradient_predivide_factor": 2.0},
    "sum": {"op": hvd.Sum},
}


@pytest.mark.parametrize("scales", [False, True], ids=["", "scaler"])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_step_has_the_host_wait_for_nothing(options, scales):
    """But for the one number at which `GradScaler.step` looks: whether a gradient overflowed."""
    torch.manual_seed(1)
    layers = torch.nn.Linear(5, 4), hvd.SyncBatchNorm(4), torch.nn.Tanh(), torch.nn.Linear(4, 2)
    model = module_on_gpu(torch.nn.Sequential(*layers), DEVICE)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        named_parameters=model.named_parameters(),
        **OPTIONS[options],
    )
    passes = OPTIONS[options].get("backward_passes_per_step", 1)
    scaler = Scaler() if scales else None
    x, y = on_gpu(torch.randn(ROWS, 5), DEVICE), on_gpu(torch.randn(ROWS, 2), DEVICE)
    queries = ["item"] if scales else []
    losses = []
    for step in range(3):
        # The first step makes what the later ones use.
        with without_waiting(*queries) if step else nullcontext():
            optimizer.zero_grad()
            for _ in range(passes):
                loss = torch.nn.functional.mse_loss(model(x), y)
                (scaler.scale(loss) if scaler else loss).backward()
            if scaler:
                scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if scaler:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            losses.append(hvd.allreduce(loss.detach(), name="loss"))
    losses = [float(loss.cpu()) for loss in losses]
    assert losses[0] > losses[1] > losses[2]


def calls(tensor):
    """Every operation on a tensor, as a call."""
    splits = [tensor.shape[0] // SIZE] * SIZE
    other, third, row = tensor * 2, tensor.clone(), tensor[:1]
    return {
        "allreduce": lambda: hvd.allreduce_async(tensor, op=hvd.Sum, name="op"),
        "allreduce_": lambda: hvd.allreduce_async_(tensor, op=hvd.Sum, name="op"),
        "average": lambda: hvd.allreduce_async(tensor, name="op"),
        "grouped_allreduce": lambda: hvd.grouped_allreduce_async([tensor, other], name="op"),
        "grouped_allreduce_": lambda: hvd.grouped_allreduce_async_([third, other], name="op"),
        "allgather": lambda: hvd.allgather_async(tensor, name="op"),
        "grouped_allgather": lambda: hvd.grouped_allgather_async([tensor, row], name="op"),
        "broadcast": lambda: hvd.broadcast_async(tensor, 0, name="op"),
        "broadcast_": lambda: hvd.broadcast_async_(tensor, 0, name="op"),
        "alltoall": lambda: hvd.alltoall_async(tensor, name="op"),
        "alltoall with splits": lambda: hvd.alltoall_async(tensor, splits, name="op"),
        "reducescatter": lambda: hvd.reducescatter_async(tensor, name="op"),
        "grouped_reducescatter": lambda: hvd.grouped_reducescatter_async(
            [tensor, other], name="op"
        ),
    }


OPERATIONS = list(calls(torch.ones(SIZE)))


@only_double
@pytest.mark.skipif(IS_STAGED, reason="the host's data plane needs the data")
# A broadcast begins with a copy, which the double makes on the host.
@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name != "broadcast"])
def test_an_operation_ends_for_the_host_before_its_tensor_is_ready(operation):
    side = Stream(DEVICE)
    tensor = on_gpu(torch.ones(ROWS * SIZE, 3), DEVICE)
    call = calls(tensor)[operation]
    hvd.synchronize(call())
    torch.cuda.current_stream(DEVICE).synchronize()
    with stream(side), side.paused(), without_waiting():
        handle = call()
        # Nothing can have run yet: whoever waits for it waits for ever.
        hvd.synchronize(handle)
    side.synchronize()


@only_double
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_records_one_event_when_it_is_called(operation):
    """And one at the end of each thing that was launched: through host memory those are two."""
    tensor = on_gpu(torch.ones(ROWS * SIZE, 3), DEVICE)
    call = calls(tensor)[operation]
    hvd.synchronize(call())
    torch.cuda.current_stream(DEVICE).synchronize()
    hvd.barrier()
    before = count("cuEventRecord")
    hvd.synchronize(call())
    # Memory for results whose size is known late is the framework's: one more for each, after what it did to have it.
    made = {"allgather": 1, "grouped_allgather": 2, "alltoall": 1, "alltoall with splits": 1}
    own = 1 + made.get(operation, 0)
    assert count("cuEventRecord") - before == own + (2 if IS_STAGED else 1)


@only_double
@pytest.mark.skipif(
    IS_ROCM, reason="there each is handed over by itself, with the stream that Python tells"
)
def test_gradients_that_are_handed_over_together_have_one_event():
    tensors = [on_gpu(torch.ones(n + 1), DEVICE) for n in range(10)]
    names = [f"events.{n}" for n in range(10)]
    before = count("cuEventRecord")
    handles = _gradient_sending.allreduce_together_(
        tensors, names, Reduction(hvd.Sum, 1.0, 1.0, hvd.global_process_set)
    )
    assert len(handles) == 10
    for handle in handles:
        hvd.synchronize(handle)
    # And at most so many for each operation, fused or not.
    launches = 2 if IS_STAGED else 1
    assert count("cuEventRecord") - before <= 1 + launches * len(handles)


@only_double
def test_operations_keep_little_memory_of_the_gpu():
    """NCCL's own is not counted, and what an operation needs only while it runs is given back."""
    small = [on_gpu(torch.ones(1 << 13), DEVICE) for _ in range(600)]
    large = on_gpu(torch.ones(1 << 22), DEVICE)
    before = bytes_in_use(DEVICE)
    for op in (hvd.Sum, hvd.Average):
        handles = [
            hvd.allreduce_async_(tensor, name=f"small.{i}", op=op, prescale_factor=0.5)
            for i, tensor in enumerate(small)
        ]
        for handle in handles:
            hvd.synchronize(handle)
        hvd.allreduce_(large, op=op, prescale_factor=0.5)
    hvd.broadcast_(large, 0).cpu()
    assert bytes_in_use(DEVICE) - before <= 16 << 20
