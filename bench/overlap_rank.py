"""One rank of overlap.py: trains a model for some steps and reports the seconds of each."""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Callable
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from launch import Report
from torch import nn

WARM_UP_STEPS = 4
STEPS_PER_BLOCK = 5


class Job(NamedTuple):
    """A peer's view of one training."""

    rank: int
    steps: dict[str, Callable[[], object]]  # by variant
    barrier: Callable[[], object]
    communicate: Callable[[], object]  # a step's gradients once more, with nothing to compute
    end: Callable[[], object]


class Training(NamedTuple):
    """A model, its optimizer and one batch of this rank."""

    model: nn.Module
    optimizer: torch.optim.Optimizer  # or a wrapper of it
    batch: torch.Tensor
    target: torch.Tensor

    def loss(self, model: nn.Module) -> torch.Tensor:
        """Forward, through `model`: this one or a wrapper of it."""
        logits = model(self.batch)
        return nn.functional.cross_entropy(logits.reshape(len(self.target), -1), self.target)

    def gradients(self) -> list[torch.Tensor]:
        """In the order of the model; None before the first step."""
        return [p.grad for p in self.model.parameters() if p.grad is not None]


def transformer() -> Training:
    """Four layers of width 512: 12.7 million parameters in 50 tensors; 32 positions a step."""
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 4), nn.Linear(512, 256))
    batch, target = torch.randn(2, 16, 512), torch.randint(0, 256, (32,))
    return Training(model, torch.optim.SGD(model.parameters(), lr=1e-3), batch, target)


def convnet() -> Training:
    """Five convolutions and two large layers: 10.1 million parameters, small images."""
    layers: list[nn.Module] = []
    widths = (3, 64, 128, 256, 512, 512)
    for before, after in itertools.pairwise(widths):
        layers += [
            nn.Conv2d(before, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
    model = nn.Sequential(
        *layers, nn.Flatten(), nn.Linear(512, 4096), nn.ReLU(), nn.Linear(4096, 1000)
    )
    batch, target = torch.randn(4, 3, 32, 32), torch.randint(0, 1000, (4,))
    return Training(model, torch.optim.SGD(model.parameters(), lr=1e-3), batch, target)


MODELS = {"transformer": transformer, "convnet": convnet}


def plain_step(training: Training, reduce: Callable[[], object] | None = None) -> Callable:
    """A step of this process alone, or with something done to the gradients once all of them are there."""

    def step() -> None:
        training.optimizer.zero_grad()
        training.loss(training.model).backward()
        if reduce:
            reduce()
        training.optimizer.step()

    return step


def horovod(make: Callable[[], Training]) -> Job:
    """Ours: each gradient sent as backward makes it; and, to compare, all of them after backward."""
    import horovod.torch as hvd

    hvd.init()
    overlapped, after = make(), make()
    optimizer = hvd.DistributedOptimizer(
        overlapped.optimizer, named_parameters=overlapped.model.named_parameters()
    )

    def communicate() -> None:
        handles = [
            hvd.allreduce_async_(gradient, name=f"after.{i}", op=hvd.Average)
            for i, gradient in enumerate(after.gradients())
        ]
        for handle in handles:
            hvd.synchronize(handle)

    steps = {
        "compute": plain_step(make()),
        "lockstep": plain_step(make(), hvd.barrier),
        "horovod": plain_step(overlapped._replace(optimizer=optimizer)),
        "after": plain_step(after, communicate),
    }
    return Job(hvd.rank(), steps, hvd.barrier, communicate, hvd.shutdown)


def ddp(make: Callable[[], Training]) -> Job:
    """PyTorch's DistributedDataParallel over Gloo."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    training = make()
    wrapped = nn.parallel.DistributedDataParallel(training.model)

    def step() -> None:
        training.optimizer.zero_grad()
        training.loss(wrapped).backward()
        training.optimizer.step()

    def communicate() -> None:
        for work in [dist.all_reduce(g, async_op=True) for g in training.gradients()]:
            work.wait()

    steps = {
        "compute": plain_step(make()),
        "lockstep": plain_step(make(), dist.barrier),
        "ddp": step,
    }
    return Job(dist.get_rank(), steps, dist.barrier, communicate, dist.destroy_process_group)


PEERS = {"horovod": horovod, "gloo": ddp}


def seconds_of(run: Callable[[], object]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    """Train and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--peer", choices=sorted(PEERS), required=True)
    parser.add_argument("--model", choices=sorted(MODELS), required=True)
    parser.add_argument("--blocks", type=int, required=True)
    options = parser.parse_args()

    torch.set_num_threads(1)

    def make() -> Training:
        torch.manual_seed(0)
        return MODELS[options.model]()

    job = PEERS[options.peer](make)
    report = Report(options.out, job.rank)
    parameters = list(make().model.parameters())
    report.add(
        parameters=sum(p.numel() for p in parameters),
        tensors=len(parameters),
        bytes=sum(p.nbytes for p in parameters),
    )
    for block in range(options.blocks):
        for variant, step in job.steps.items():
            # The first step after another variant finds cold caches, in the first block also new memory.
            for _ in range(1 if block else WARM_UP_STEPS):
                step()
            job.barrier()
            # Steps follow each other as in training, with no barrier between them.
            seconds = [seconds_of(step) for _ in range(STEPS_PER_BLOCK)]
            report.add(variant=variant, steps=seconds)
        for _ in range(STEPS_PER_BLOCK):
            job.barrier()
            report.add(alone=seconds_of(job.communicate))
    report.done()
    job.barrier()
    job.end()


if __name__ == "__main__":
    main()
