"""The usual script, made elastic: handwritten digits on processes that may die, leave and come.

    horovodrun -np 2 --min-np 1 --host-discovery-script ./hosts.sh python pytorch_mnist_elastic.py

where ./hosts.sh prints one line per host, such as `localhost:2`. It runs without an elastic launcher, too. The digits
are those inside scikit-learn, so nothing is downloaded.
"""

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

import horovod.torch as hvd


def parse_args():
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Elastic PyTorch digits with Horovod")
    parser.add_argument("--batch-size", type=int, default=64, help="batch size of each process")
    parser.add_argument("--test-batch-size", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate of one process")
    parser.add_argument("--momentum", type=float, default=0.5)
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], help="where to compute; a GPU where PyTorch finds one"
    )
    parser.add_argument("--no-cuda", action="store_true", default=False, help="as --device cpu")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument(
        "--log-interval", type=int, default=10, help="batches between two log lines"
    )
    parser.add_argument(
        "--fp16-allreduce", action="store_true", default=False, help="send gradients as float16"
    )
    parser.add_argument(
        "--use-adasum", action="store_true", default=False, help="combine steps with Adasum"
    )
    parser.add_argument(
        "--batches-per-commit",
        type=int,
        default=10,
        help="batches between two commits: at most so many are repeated after a failure",
    )
    parser.add_argument(
        "--data-dir", help="accepted for scripts that pass it; nothing is downloaded"
    )
    return parser.parse_args()


class Net(nn.Module):
    """Two convolutions and two linear layers for images of 8 x 8 pixels."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=3, padding=1)
        self.fc1 = nn.Linear(32 * 2 * 2, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        return F.log_softmax(self.fc2(F.relu(self.fc1(x.flatten(1)))), dim=1)


def load_data(args):
    """Split the digits into training and test images."""
    digits: Any = load_digits()
    images = torch.from_numpy((digits.images - 4.9) / 6.0).float().unsqueeze(1)
    labels = torch.from_numpy(digits.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(args.seed))
    train, test = order[: len(order) * 4 // 5], order[len(order) * 4 // 5 :]
    # Every training image also moved by one pixel to each side.
    moved = [images[train], *(images[train].roll(by, axis) for axis in (2, 3) for by in (-1, 1))]
    repeated = labels[train].repeat(len(moved))
    return TensorDataset(torch.cat(moved), repeated), TensorDataset(images[test], labels[test])


def train_epoch(state, loader, args, device):
    """The rest of one pass over the data: all of it, or the batches not committed before an interruption."""
    state.model.train()
    for index, (data, target) in enumerate(loader):
        data, target = data.to(device), target.to(device)
        state.optimizer.zero_grad()
        loss = F.nll_loss(state.model(data), target)
        loss.backward()
        state.optimizer.step()
        # The sampler has to know what is done before a commit may say so.
        state.sampler.record_batch(index, args.batch_size)
        state.batch += 1
        if state.batch % args.batches_per_commit == 0:
            state.commit()
        if state.batch % args.log_interval == 0 and hvd.rank() == 0:
            print(
                f"Train Epoch: {state.epoch} batch {state.batch} on {hvd.size()} processes\t"
                f"Loss: {loss.item():.6f}",
                flush=True,
            )


def test(state, test_data, args, device):
    """Test on every process's part, and average; return the accuracy."""
    state.model.eval()
    # By rank and size as they are now.
    part = torch.utils.data.Subset(test_data, range(hvd.rank(), len(test_data), hvd.size()))
    right = torch.zeros(2)
    with torch.no_grad():
        for data, target in DataLoader(part, args.test_batch_size):
            output = state.model(data.to(device))
            right[0] += (output.argmax(1) == target.to(device)).sum().item()
            right[1] += len(target)
    right = hvd.allreduce(right, op=hvd.Sum, name="right")
    accuracy = (right[0] / right[1]).item()
    if hvd.rank() == 0:
        print(f"\nTest set: Accuracy: {100.0 * accuracy:.2f}%\n", flush=True)
    return accuracy


def main(args):
    """The program of every process, also of one that joins later."""
    hvd.init()
    torch.manual_seed(args.seed)
    wanted = "cpu" if args.no_cuda else args.device
    cuda = torch.cuda.is_available() if wanted is None else wanted == "cuda"
    if cuda:
        # One GPU per process.
        torch.cuda.set_device(hvd.local_rank())
    device = torch.device("cuda" if cuda else "cpu")
    # Processes share the machine's cores.
    torch.set_num_threads(1)

    train_data, test_data = load_data(args)
    sampler = hvd.elastic.ElasticSampler(train_data, seed=args.seed)
    loader = DataLoader(train_data, batch_size=args.batch_size, sampler=sampler)

    model = Net().to(device)

    def rate():
        # More processes mean larger batches, hence larger steps.
        if not args.use_adasum:
            return args.lr * hvd.size()
        # Adasum needs no larger rate, but with NCCL it averages the processes of each host first.
        return args.lr * (hvd.local_size() if cuda and hvd.nccl_built() else 1)

    optimizer = optim.SGD(model.parameters(), lr=rate(), momentum=args.momentum)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
    )

    @hvd.elastic.run
    def train(state):
        # Here, not in a reset callback: it is the root's optimizer that all get, and the size is known to all.
        for group in optimizer.param_groups:
            group["lr"] = rate()
        accuracy = 0.0
        while state.epoch <= args.epochs:
            train_epoch(state, loader, args, device)
            accuracy = test(state, test_data, args, device)
            state.epoch += 1
            state.batch = 0
            state.sampler.set_epoch(state.epoch)
            state.commit()
        return accuracy

    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=1, batch=0)
    train(state)
    print(f"process {hvd.rank()} of {hvd.size()} is done", flush=True)


if __name__ == "__main__":
    main(parse_args())
