"""Learns handwritten digits on any number of processes; the same global batches on one or many.

Start it as `horovodrun -np 2 python train_digits.py`, or see `make demo`.
"""

import argparse
import json
import time
from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import horovod.torch as hvd

WARM_UP_STEPS = 5  # not timed


def parse_args():
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=96, help="of all processes together")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--width", type=int, default=24, help="channels of the first layer")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--result", help="rank 0 writes the loss of every step here (JSON)")
    return parser.parse_args()


def load_data(seed):
    """1,797 images of 8 x 8 pixels, a fifth of them kept for the test; they ship inside scikit-learn."""
    digits: Any = load_digits()
    images = torch.from_numpy(digits.images / 16.0).unsqueeze(1)
    labels = torch.from_numpy(digits.target).long()
    train, test = train_test_split(
        range(len(labels)), test_size=0.2, random_state=seed, stratify=digits.target
    )
    # Every training image also moved by one pixel to each side: five times as many.
    seen = images[train]
    moved = [seen, *(seen.roll(by, side) for side in (2, 3) for by in (-1, 1))]
    return torch.cat(moved), labels[train].repeat(len(moved)), images[test], labels[test]


def build_model(width):
    """A small convolutional network in double precision."""
    # Double precision: one process and several add up the same numbers in another order, and with float32 the
    # roundings would grow apart over the steps.
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, width, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(width, 2 * width, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(2 * width * 16, 128),
        torch.nn.ReLU(),
        torch.nn.Linear(128, 10),
    ).double()


def main():
    """Train, test, and report from rank 0."""
    args = parse_args()
    hvd.init()
    if args.batch_size % hvd.size():
        raise SystemExit(
            f"--batch-size {args.batch_size} cannot be shared by {hvd.size()} processes"
        )
    torch.manual_seed(args.seed)
    images, labels, test_images, test_labels = load_data(args.seed)
    model = build_model(args.width)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    share = args.batch_size // hvd.size()
    steps_per_epoch = len(labels) // args.batch_size
    steps = args.epochs * steps_per_epoch
    shuffle = torch.Generator().manual_seed(args.seed)
    losses = []
    start = None
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(args.epochs):
        order = torch.randperm(len(labels), generator=shuffle)
        for batch in order.split(args.batch_size)[:steps_per_epoch]:
            if len(losses) == WARM_UP_STEPS:
                start = time.perf_counter()
            mine = batch[hvd.rank() * share :][:share]
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(images[mine]), labels[mine])
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(hvd.allreduce(loss.detach(), name="loss").item())
            if hvd.rank() == 0:
                print(f"step {len(losses)} of {steps} loss {losses[-1]:.4f}", flush=True)
    speed = None
    if start is not None and steps > WARM_UP_STEPS:
        speed = (steps - WARM_UP_STEPS) * args.batch_size / (time.perf_counter() - start)

    with torch.no_grad():
        right = (model(test_images).argmax(1) == test_labels).double().mean()
    # Every rank has tested the same model; the average only shows that they agree.
    accuracy = hvd.allreduce(right, name="accuracy").item()
    if hvd.rank() == 0:
        print(f"test accuracy {100 * accuracy:.2f} %", flush=True)
        if args.result:
            result = {
                "processes": hvd.size(),
                "losses": losses,
                "accuracy": accuracy,
                "samples_per_second": speed,
            }
            with open(args.result, "w") as file:
                json.dump(result, file)
    hvd.shutdown()


if __name__ == "__main__":
    main()
