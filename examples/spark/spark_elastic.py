"""Handwritten digits on ranks in Spark tasks that may be lost: an executor is killed on purpose, and training goes on.

    python spark_elastic.py --num-proc 2
    spark-submit --master spark://host:7077 --conf spark.task.maxFailures=100 spark_elastic.py --num-proc 4

Without spark-submit it starts executors of its own on this machine (local-cluster). The digits are those inside
scikit-learn, so nothing is downloaded.
"""

import argparse
import itertools
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

import horovod.spark
from horovod.spark.conf import SPARK_CONF_ALWAYS_RESTART_FAILED_TASK


def kill_executor() -> None:
    """End the Java that is this rank's executor, as a machine that fails would: at once."""
    import signal

    pid = os.getpid()
    while Path(f"/proc/{pid}/comm").read_text().strip() != "java":
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(pid, signal.SIGKILL)
    signal.pause()


def train(epochs: int, batch_size: int, lr: float, wanted: int, kill_at: int) -> dict[str, Any]:
    """The program of every rank, also of one that joins later; returns its observations."""
    import torch
    import torch.nn.functional as F
    from sklearn.datasets import load_digits
    from torch import nn, optim
    from torch.utils.data import DataLoader, TensorDataset

    import horovod.torch as hvd

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
    def learn(state: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = lr * hvd.size()
        # Goes on until all ranks are there again, and have trained some epochs more.
        while state.epoch < epochs or state.sizes[-3:] != [wanted] * 3:
            for index, (batch, target) in enumerate(loader):
                optimizer.zero_grad()
                F.cross_entropy(model(batch), target).backward()
                optimizer.step()
                state.sampler.record_batch(index, batch_size)
            state.epoch += 1
            state.sizes = [*state.sizes, hvd.size()]
            state.sampler.set_epoch(state.epoch)
            state.commit()
            if state.epoch == kill_at and hvd.size() == wanted == hvd.rank() + 1:
                kill_executor()

    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, sizes=[])
    learn(state)
    with torch.no_grad():
        right = (model(images[:test]).argmax(1) == labels[:test]).float().mean()
    return {"accuracy": float(right), "epochs": state.epoch, "sizes": state.sizes}


def main() -> None:
    """Train on Spark, and print what became of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--master", help="default: that of spark-submit, or executors here")
    parser.add_argument("--num-proc", type=int, default=2, help="number of ranks")
    parser.add_argument("--epochs", type=int, default=10, help="at least")
    parser.add_argument("--batch-size", type=int, default=32, help="batch size of each rank")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of one rank")
    parser.add_argument(
        "--kill-at", type=int, default=3, help="epoch after which an executor is killed; 0: none"
    )
    args = parser.parse_args()

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName("digits").config(*SPARK_CONF_ALWAYS_RESTART_FAILED_TASK)
    if args.master or "SPARK_ENV_LOADED" not in os.environ:
        os.environ.setdefault("SPARK_WORKER_DIR", tempfile.mkdtemp(prefix="spark-work-"))
        builder = builder.master(args.master or f"local-cluster[{args.num_proc},1,1024]")
        builder = builder.config("spark.executor.memory", "512m")
    spark = builder.getOrCreate()
    results = horovod.spark.run_elastic(
        train,
        (args.epochs, args.batch_size, args.lr, args.num_proc, args.kill_at),
        num_proc=args.num_proc,
        min_num_proc=max(1, args.num_proc - 1),
    )
    spark.stop()
    first = results[0]
    for ranks, phase in itertools.groupby(first["sizes"]):
        print(f"{len(list(phase))} epochs on {ranks} ranks")
    print(
        f"accuracy {first['accuracy']:.2%} on {len(results)} ranks after {first['epochs']} epochs"
    )


if __name__ == "__main__":
    main()
