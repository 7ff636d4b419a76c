"""One rank of gpu.py: trains a model on its GPU for some steps, and times calls and memory of the communication."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from launch import Report
from torch import nn

WARM_UP_STEPS = 5
STEPS_PER_BLOCK = 10
CALLS_PER_BLOCK = 50
WARM_UP_CALLS = 20


class Gpu:
    """Where a rank computes; with "cpu" all but the figures' meaning is the same."""

    def __init__(self, device: str) -> None:
        self.is_real = device == "cuda"
        if not self.is_real:
            self.device = torch.device("cpu")
            return
        ordinal = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
        torch.cuda.set_device(ordinal)
        self.device = torch.device("cuda", ordinal)

    def rest(self) -> None:
        """Wait until everything that was put on the GPU has ended."""
        if self.is_real:
            torch.cuda.synchronize()

    def bytes_of_others(self) -> int:
        """Memory in use on the GPU that is not PyTorch's: contexts, libraries, and whatever else runs there."""
        if not self.is_real:
            return 0
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved()


class Bottleneck(nn.Module):
    """Three convolutions beside a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        layers: list[nn.Module] = []
        for before, after, size, step in (
            (inputs, width, 1, 1),
            (width, width, 3, stride),
            (width, outputs, 1, 1),
        ):
            layers += [
                nn.Conv2d(before, after, size, step, padding=size // 2, bias=False),
                nn.BatchNorm2d(after),
                nn.ReLU(inplace=True),
            ]
        self.body = nn.Sequential(*layers[:-1])
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The next features."""
        return nn.functional.relu(self.body(x) + self.shortcut(x))


def resnet50() -> nn.Module:
    """As ResNet-50: 25.6 million parameters in 161 tensors."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, padding=3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, padding=1),
    ]
    inputs = 64
    for stage, depth in enumerate((3, 4, 6, 3)):
        width = 64 * 2**stage
        for block in range(depth):
            layers.append(Bottleneck(inputs, width, 2 if stage and not block else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


def transformer() -> nn.Module:
    """Six layers of width 768: 43 million parameters in 76 tensors."""
    layer = nn.TransformerEncoderLayer(768, 12, 3072, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 6), nn.Linear(768, 1000))


class Training(NamedTuple):
    """A model, its optimizer and one batch of this rank."""

    model: nn.Module
    optimizer: Any
    batch: torch.Tensor
    target: torch.Tensor

    def step(self, through: nn.Module | None = None) -> None:
        """Forward, through the model or a wrapper of it, backward, and the optimizer's step."""
        self.optimizer.zero_grad()
        with torch.autocast(self.batch.device.type, torch.bfloat16):
            logits = (through or self.model)(self.batch)
            loss = nn.functional.cross_entropy(logits.reshape(len(self.target), -1), self.target)
        loss.backward()
        self.optimizer.step()


def training(model: str, gpu: Gpu, batch_size: int) -> Training:
    """A new one, the same on every rank."""
    torch.manual_seed(0)
    shape: tuple[int, ...]
    if model == "resnet50":
        made, shape, labels = resnet50(), (batch_size, 3, 224, 224), batch_size
    else:
        made, shape, labels = transformer(), (batch_size, 128, 768), batch_size * 128
    made = made.to(gpu.device)
    batch = torch.randn(shape, device=gpu.device)
    target = torch.randint(0, 1000, (labels,), device=gpu.device)
    return Training(made, torch.optim.SGD(made.parameters(), lr=1e-3), batch, target)


class Peer(NamedTuple):
    """How one peer communicates."""

    rank: int
    size: int
    barrier: Callable[[], object]
    start: Callable[[torch.Tensor, str], Callable[[], object]]  # an operation, and its wait
    steps: Callable[[Callable[[], Training]], dict[str, Callable[[], object]]]  # by variant
    end: Callable[[], object]


def horovod(device: str) -> Peer:
    """Ours, and training without communication beside it: twice, for what equal runs differ by."""
    del device
    import horovod.torch as hvd

    hvd.init()
    os.environ.setdefault("LOCAL_RANK", str(hvd.local_rank()))
    # The optimizer leaves out an average of one rank, but not a maximum.
    op = hvd.Max if hvd.size() == 1 else hvd.Average

    def start(tensor: torch.Tensor, name: str) -> Callable[[], object]:
        handle = hvd.allreduce_async_(tensor, name=name, op=hvd.Sum)
        return lambda: hvd.synchronize(handle)

    def steps(make: Callable[[], Training]) -> dict[str, Callable[[], object]]:
        reduced = make()
        optimizer = hvd.DistributedOptimizer(
            reduced.optimizer, named_parameters=reduced.model.named_parameters(), op=op
        )
        return {
            "plain": make().step,
            "horovod": reduced._replace(optimizer=optimizer).step,
            "plain again": make().step,
        }

    return Peer(hvd.rank(), hvd.size(), hvd.barrier, start, steps, hvd.shutdown)


def ddp(device: str) -> Peer:
    """PyTorch's DistributedDataParallel, over NCCL on GPUs."""
    import torch.distributed as dist

    dist.init_process_group("nccl" if device == "cuda" else "gloo")

    def start(tensor: torch.Tensor, name: str) -> Callable[[], object]:
        del name
        work = dist.all_reduce(tensor, async_op=True)
        return work.wait

    def steps(make: Callable[[], Training]) -> dict[str, Callable[[], object]]:
        trained = make()
        wrapped = nn.parallel.DistributedDataParallel(trained.model)
        return {"ddp": lambda: trained.step(wrapped)}

    return Peer(
        dist.get_rank(),
        dist.get_world_size(),
        dist.barrier,
        start,
        steps,
        dist.destroy_process_group,
    )


PEERS = {"horovod": horovod, "ddp": ddp}


def microseconds(calls: int, begun: float) -> float:
    """The time of one of so many calls since then."""
    return (time.perf_counter() - begun) / calls * 1e6


def time_calls(report: Report, peer: Peer, gpu: Gpu, blocks: int) -> None:
    """One small operation from call to result, and how long the host is at handing over a tensor."""
    small = torch.zeros(1, device=gpu.device)
    gradients = [torch.zeros(1 << 16, device=gpu.device) for _ in range(CALLS_PER_BLOCK)]

    def submit() -> list[Callable[[], object]]:
        return [peer.start(tensor, f"gradient {i}") for i, tensor in enumerate(gradients)]

    def finish(waits: list[Callable[[], object]]) -> None:
        for wait in waits:
            wait()
        gpu.rest()

    for _ in range(WARM_UP_CALLS):
        peer.start(small, "small")()
    finish(submit())
    for _ in range(blocks):
        peer.barrier()
        begun = time.perf_counter()
        for _ in range(CALLS_PER_BLOCK):
            peer.start(small, "small")()
            gpu.rest()
        report.add(latency_us=microseconds(CALLS_PER_BLOCK, begun))
        peer.barrier()
        begun = time.perf_counter()
        waits = submit()
        report.add(submission_us=microseconds(len(waits), begun))
        finish(waits)


def time_steps(
    report: Report, peer: Peer, gpu: Gpu, make: Callable[[], Training], blocks: int
) -> None:
    """Steps of each variant, in turns."""
    variants = peer.steps(make)
    for block in range(blocks):
        for variant, step in variants.items():
            for _ in range(1 if block else WARM_UP_STEPS):
                step()
            gpu.rest()
            peer.barrier()
            begun = time.perf_counter()
            for _ in range(STEPS_PER_BLOCK):
                step()
            gpu.rest()
            report.add(variant=variant, seconds=(time.perf_counter() - begun) / STEPS_PER_BLOCK)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--peer", choices=sorted(PEERS), required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--models", nargs="+", required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--blocks", type=int, required=True)
    options = parser.parse_args()

    peer = PEERS[options.peer](options.device)
    gpu = Gpu(options.device)
    report = Report(options.out, peer.rank)
    gpu.rest()
    torch.zeros(1, device=gpu.device)
    before = gpu.bytes_of_others()
    for nbytes in (4, 1 << 25):
        peer.start(torch.zeros(nbytes // 4, device=gpu.device), f"first {nbytes}")()
    gpu.rest()
    peer.barrier()
    report.add(bytes_beside=gpu.bytes_of_others() - before, ranks=peer.size)
    time_calls(report, peer, gpu, options.blocks)
    for model in options.models:
        report.add(model=model)

        def make(model: str = model) -> Training:
            return training(model, gpu, options.batch_size)

        time_steps(report, peer, gpu, make, options.blocks)
        if gpu.is_real:
            torch.cuda.empty_cache()
    report.done()
    peer.barrier()
    with contextlib.suppress(RuntimeError):
        peer.end()


if __name__ == "__main__":
    main()
