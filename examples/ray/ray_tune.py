"""The best learning rate for handwritten digits: each trial of Ray Tune is a job of several ranks.

    python ray_tune.py --num-workers 2

The ranks of a trial are actors in its placement group. The digits are those inside scikit-learn.
"""

import argparse
import tempfile
from typing import Any

import ray
import torch
import torch.nn.functional as F
from ray import tune
from sklearn.datasets import load_digits
from torch import nn, optim

import horovod.torch as hvd
from horovod.ray import RayExecutor


def train(lr: float, epochs: int) -> float:
    """The program of every rank of a trial; returns the accuracy."""
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
        optim.SGD(model.parameters(), lr=lr, momentum=0.9),
        named_parameters=model.named_parameters(),
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    # Every rank the same number of batches.
    usable = (len(labels) - test) // hvd.size() * hvd.size()
    mine = slice(test + hvd.rank(), test + usable, hvd.size())
    for _ in range(epochs):
        batches = zip(images[mine].split(32), labels[mine].split(32), strict=True)
        for batch, target in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(batch), target).backward()
            optimizer.step()
    with torch.no_grad():
        return float((model(images[:test]).argmax(1) == labels[:test]).float().mean())


def trial(config: dict[str, Any]) -> None:
    """A trial: its ranks get what is left of its placement group."""
    executor = RayExecutor(RayExecutor.create_settings(), num_workers=config["num_workers"])
    executor.start()
    try:
        accuracies = executor.run(train, args=[config["lr"], config["epochs"]])
    finally:
        executor.shutdown()
    tune.report({"accuracy": accuracies[0]})


def main() -> None:
    """Try learning rates, and print the best one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", help="of a cluster; default: one of this machine alone")
    parser.add_argument("--num-workers", type=int, default=2, help="ranks of a trial")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, nargs="+", default=[0.0001, 0.02])
    args = parser.parse_args()

    cpus = None if args.address else args.num_workers
    ray.init(address=args.address or "local", num_cpus=cpus, include_dashboard=False)
    # The first bundle is the trial's own process, which only waits.
    bundles = [{"CPU": 0.0}, *[{"CPU": 1.0}] * args.num_workers]
    results = tune.Tuner(
        tune.with_resources(trial, tune.PlacementGroupFactory(bundles)),
        param_space={
            "lr": tune.grid_search(args.lr),
            "epochs": args.epochs,
            "num_workers": args.num_workers,
        },
        run_config=tune.RunConfig(storage_path=tempfile.mkdtemp(prefix="ray-tune-")),
    ).fit()
    best = results.get_best_result("accuracy", "max")
    assert best.config is not None
    assert best.metrics is not None
    print(f"best learning rate {best.config['lr']}: accuracy {best.metrics['accuracy']:.2%}")


if __name__ == "__main__":
    main()
