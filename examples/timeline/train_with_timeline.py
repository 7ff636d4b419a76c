"""Trains a small convolutional network and records a timeline of some steps: gradients of late layers travel while
those of early layers are still computed.

    HOROVOD_TIMELINE=DYNAMIC horovodrun -np 2 python examples/timeline/train_with_timeline.py --timeline timeline.json
    python examples/timeline/draw.py timeline.json timeline.png

Or open timeline.json in https://ui.perfetto.dev or chrome://tracing.
"""

import argparse
import itertools

import torch
from torch import nn

import horovod.torch as hvd


def network() -> nn.Module:
    """Five blocks, each half as large and twice as deep as the one before it."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise((3, 64, 128, 256, 512, 512)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        layers += [nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 1000))


def main() -> None:
    """Train: some steps to warm up, then some that are recorded."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--timeline", default="timeline.json", help="file that rank 0 writes")
    parser.add_argument("--warm-up", type=int, default=5, help="steps before the recording")
    parser.add_argument("--steps", type=int, default=5, help="steps that are recorded")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cpu")
    options = parser.parse_args()

    hvd.init()
    if options.device == "cuda":
        # One GPU per process.
        torch.cuda.set_device(hvd.local_rank())
    torch.manual_seed(hvd.rank())
    torch.set_num_threads(1)
    model = network().to(options.device)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
    )
    loss_of = nn.CrossEntropyLoss()
    images = torch.randn(16, 3, 32, 32, device=options.device)
    labels = torch.randint(0, 1000, (16,), device=options.device)

    for step in range(options.warm_up + options.steps):
        if step == options.warm_up:
            hvd.start_timeline(options.timeline)
            hvd.barrier()  # rank 0 says for all when to begin: from here on it has
        optimizer.zero_grad()
        loss = loss_of(model(images), labels)
        loss.backward()
        optimizer.step()
        if hvd.rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    hvd.stop_timeline()


if __name__ == "__main__":
    main()
