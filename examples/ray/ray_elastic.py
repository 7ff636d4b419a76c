"""Handwritten digits on actors of Ray that may die, leave and come.

    python ray_elastic.py --min-workers 1 --max-workers 2
    python ray_elastic.py --address auto --min-workers 2 --max-workers 16

Kill a worker while it runs: the others go on, and another takes its place. The digits are those inside scikit-learn.
"""

import argparse
from typing import Any

import ray
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

import horovod.torch as hvd
from horovod.ray import RayExecutor, ray_logger


def train(epochs: int, batch_size: int, lr: float) -> float:
    """The program of every worker, also of one that joins later; returns the final accuracy."""
    hvd.init()
    torch.manual_seed(42)
    digits: Any = load_digits()
    images = torch.from_numpy((digits.images - 4.9) / 6.0).float().flatten(1)
    labels = torch.from_numpy(digits.target).long()
    order = torch.randperm(len(labels))
    images, labels = images[order], labels[order]
    test = len(labels) // 5
    data = TensorDataset(images[test:], labels[test:])
    sampler = hvd.elastic.ElasticSampler(data, seed=42)
    loader = DataLoader(data, batch_size=batch_size, sampler=sampler)

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = hvd.DistributedOptimizer(
        optim.SGD(model.parameters(), lr=lr, momentum=0.9),
        named_parameters=model.named_parameters(),
    )

    @hvd.elastic.run
    def learn(state: Any) -> float:
        for group in optimizer.param_groups:
            group["lr"] = lr * hvd.size()
        while state.epoch < epochs:
            losses = []
            for index, (batch, target) in enumerate(loader):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(batch), target)
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
                state.sampler.record_batch(index, batch_size)
            if hvd.rank() == 0:
                loss = float(torch.stack(losses).mean())
                ray_logger.log({"epoch": state.epoch + 1, "loss": loss, "workers": hvd.size()})
            state.epoch += 1
            state.sampler.set_epoch(state.epoch)
            state.commit()
        with torch.no_grad():
            return float((model(images[:test]).argmax(1) == labels[:test]).float().mean())

    return learn(hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0))


def main() -> None:
    """Train, and print what the workers report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", help="of a cluster; default: one of this machine alone")
    parser.add_argument("--min-workers", type=int, default=1)
    parser.add_argument("--max-workers", type=int, default=2)
    parser.add_argument("--use-gpu", action="store_true", help="reserve a GPU for each worker")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.02)
    args = parser.parse_args()

    cpus = None if args.address else args.max_workers
    ray.init(address=args.address or "local", num_cpus=cpus, include_dashboard=False)
    executor = RayExecutor(
        RayExecutor.create_settings(),
        min_workers=args.min_workers,
        max_workers=args.max_workers,
        use_gpu=args.use_gpu,
    )
    executor.start()
    accuracies = executor.run(
        train,
        args=[args.epochs, args.batch_size, args.lr],
        callbacks=[lambda values: print(values, flush=True)],
    )
    print(f"accuracy {accuracies[0]:.2%} on {len(accuracies)} workers at the end")
    executor.shutdown()


if __name__ == "__main__":
    main()
