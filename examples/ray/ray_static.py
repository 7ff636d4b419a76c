"""Handwritten digits on the actors of a Ray cluster: each is a rank, and keeps its model between calls.

    python ray_static.py --num-workers 2
    python ray_static.py --address auto --num-hosts 2 --workers-per-host 4

The digits are those inside scikit-learn, so nothing is downloaded.
"""

import argparse
from typing import Any

import ray
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn, optim

import horovod.torch as hvd
from horovod.ray import RayExecutor


class Learner:
    """A rank's model and its part of the digits."""

    def __init__(self, batch_size: int, lr: float) -> None:
        hvd.init()
        torch.manual_seed(42)
        digits: Any = load_digits()
        images = torch.from_numpy((digits.images - 4.9) / 6.0).float().flatten(1)
        labels = torch.from_numpy(digits.target).long()
        order = torch.randperm(len(labels))
        images, labels = images[order], labels[order]
        test = len(labels) // 5
        # Every rank the same number of batches.
        usable = (len(labels) - test) // hvd.size() * hvd.size()
        mine = slice(test + hvd.rank(), test + usable, hvd.size())
        self.images, self.labels = images[mine], labels[mine]
        self.test_images, self.test_labels = images[:test], labels[:test]
        self.batch_size = batch_size
        self.model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.optimizer = hvd.DistributedOptimizer(
            optim.SGD(self.model.parameters(), lr=lr * hvd.size(), momentum=0.9),
            named_parameters=self.model.named_parameters(),
        )
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)

    def train(self) -> float:
        """One pass over the data; the mean loss of all ranks."""
        losses = []
        images, labels = self.images.split(self.batch_size), self.labels.split(self.batch_size)
        for batch, target in zip(images, labels, strict=True):
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(batch), target)
            loss.backward()
            self.optimizer.step()
            losses.append(loss.detach())
        return float(hvd.allreduce(torch.stack(losses).mean(), name="loss"))

    def accuracy(self) -> float:
        """On the digits that nobody trained on."""
        with torch.no_grad():
            right = self.model(self.test_images).argmax(1) == self.test_labels
        return float(right.float().mean())


def main() -> None:
    """Train, and print what rank 0 has learned."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", help="of a cluster; default: one of this machine alone")
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--num-hosts", type=int, help="instead: so many nodes, the same on each")
    parser.add_argument("--workers-per-host", type=int, default=1)
    parser.add_argument("--use-gpu", action="store_true", help="reserve a GPU for each worker")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.02)
    args = parser.parse_args()

    cpus = None if args.address else args.num_workers
    ray.init(address=args.address or "local", num_cpus=cpus, include_dashboard=False)
    where = {"num_workers": args.num_workers}
    if args.num_hosts:
        where = {"num_hosts": args.num_hosts, "num_workers_per_host": args.workers_per_host}
    executor = RayExecutor(RayExecutor.create_settings(), use_gpu=args.use_gpu, **where)
    executor.start(executable_cls=Learner, executable_args=[args.batch_size, args.lr])
    for epoch in range(args.epochs):
        losses = executor.execute(lambda learner: learner.train())
        print(f"epoch {epoch + 1}: loss {losses[0]:.4f} on {len(losses)} workers", flush=True)
    print(f"accuracy {executor.execute_single(lambda learner: learner.accuracy()):.2%}")
    executor.shutdown()


if __name__ == "__main__":
    main()
