"""Handwritten digits with Ray Train, whose workers are ranks.

    python ray_train.py --num-workers 2

The digits are those inside scikit-learn, so nothing is downloaded.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
import torch.nn.functional as F
from ray.train import Checkpoint, RunConfig, ScalingConfig
from sklearn.datasets import load_digits
from torch import nn, optim

import horovod.torch as hvd
from horovod.ray.train import HorovodTrainer


def train(config: dict[str, Any]) -> None:
    """The program of every worker."""
    hvd.init()
    torch.manual_seed(42)
    digits: Any = load_digits()
    images = torch.from_numpy((digits.images - 4.9) / 6.0).float().flatten(1)
    labels = torch.from_numpy(digits.target).long()
    order = torch.randperm(len(labels))
    images, labels = images[order], labels[order]
    test = len(labels) // 5
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = hvd.DistributedOptimizer(
        optim.SGD(model.parameters(), lr=config["lr"] * hvd.size(), momentum=0.9),
        named_parameters=model.named_parameters(),
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    # Every rank the same number of batches.
    usable = (len(labels) - test) // hvd.size() * hvd.size()
    mine = slice(test + hvd.rank(), test + usable, hvd.size())
    for _ in range(config["epochs"]):
        batches = zip(images[mine].split(32), labels[mine].split(32), strict=True)
        for batch, target in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(batch), target).backward()
            optimizer.step()
        with torch.no_grad():
            right = (model(images[:test]).argmax(1) == labels[:test]).float().mean()
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if hvd.rank() == 0:
                torch.save(model.state_dict(), Path(folder) / "model.pt")
                checkpoint = Checkpoint.from_directory(folder)
            ray.train.report({"accuracy": float(right)}, checkpoint=checkpoint)


def main() -> None:
    """Train, and print the accuracy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", help="of a cluster; default: one of this machine alone")
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--use-gpu", action="store_true", help="reserve a GPU for each worker")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument(
        "--storage", help="folder or URL for checkpoints that all nodes reach; default a new one"
    )
    args = parser.parse_args()

    cpus = None if args.address else args.num_workers + 1
    ray.init(address=args.address or "local", num_cpus=cpus, include_dashboard=False)
    result = HorovodTrainer(
        train,
        train_loop_config={"epochs": args.epochs, "lr": args.lr},
        scaling_config=ScalingConfig(num_workers=args.num_workers, use_gpu=args.use_gpu),
        run_config=RunConfig(storage_path=args.storage or tempfile.mkdtemp(prefix="ray-train-")),
    ).fit()
    assert result.metrics is not None
    assert result.checkpoint is not None
    print(f"accuracy {result.metrics['accuracy']:.2%}, checkpoint {result.checkpoint.path}")


if __name__ == "__main__":
    main()
