"""The usual Horovod script: handwritten digits on any number of processes and hosts.

    horovodrun -np 2 python pytorch_mnist.py
    horovodrun -np 4 -H host1:2,host2:2 python pytorch_mnist.py --use-adasum

The digits are those inside scikit-learn, so nothing is downloaded.
"""

import argparse
import os
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import horovod
import horovod.torch as hvd


def parse_args():
    """Read the command line."""
    parser = argparse.ArgumentParser(description="PyTorch digits with Horovod")
    parser.add_argument("--batch-size", type=int, default=64, help="batch size of each process")
    parser.add_argument("--test-batch-size", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.01, help="learning rate of one process")
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
        "--use-mixed-precision",
        action="store_true",
        default=False,
        help="compute in half precision with a scaled loss",
    )
    parser.add_argument(
        "--use-adasum", action="store_true", default=False, help="combine steps with Adasum"
    )
    parser.add_argument(
        "--gradient-predivide-factor",
        type=float,
        default=1.0,
        help="divide gradients by this before the sum instead of all after it",
    )
    parser.add_argument("--data-dir", help="folder for checkpoints, written by rank 0")
    parser.add_argument(
        "--max-samples", type=int, help="use only this many images, to try things out"
    )
    # For a start without `horovodrun`.
    parser.add_argument("--num-proc", type=int, help="start this many processes from here")
    parser.add_argument("--hosts", help="where to start them: host1:slots,host2:slots")
    parser.add_argument("--communication", choices=["gloo", "mpi"], help="how they are started")
    return parser.parse_args()


class Net(nn.Module):
    """Two convolutions and two linear layers for images of 8 x 8 pixels."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=3, padding=1)
        self.norm1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=3, padding=1)
        self.norm2 = nn.BatchNorm2d(32)
        self.dropout = nn.Dropout2d(0.1)
        self.fc1 = nn.Linear(32 * 2 * 2, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.norm1(self.conv1(x)), 2))
        x = F.relu(F.max_pool2d(self.dropout(self.norm2(self.conv2(x))), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        return F.log_softmax(self.fc2(x), dim=1)


def load_data(args) -> tuple[TensorDataset, TensorDataset]:
    """Split the digits into training and test images."""
    digits: Any = load_digits()
    images = torch.from_numpy((digits.images - 4.9) / 6.0).float().unsqueeze(1)
    labels = torch.from_numpy(digits.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(args.seed))
    order = order[: args.max_samples]
    train, test = order[: len(order) * 4 // 5], order[len(order) * 4 // 5 :]
    # Every training image also moved by one pixel to each side.
    moved = [images[train], *(images[train].roll(by, axis) for axis in (2, 3) for by in (-1, 1))]
    repeated = labels[train].repeat(len(moved))
    return TensorDataset(torch.cat(moved), repeated), TensorDataset(images[test], labels[test])


def train_epoch(epoch, model, optimizer, loader, sampler, scaler, args, device):
    """One pass over this process's part of the data."""
    model.train()
    sampler.set_epoch(epoch)
    for index, (data, target) in enumerate(loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        if scaler is None:
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
        else:
            with torch.autocast(device.type):
                loss = F.nll_loss(model(data).float(), target)
            scaler.scale(loss).backward()
            # All gradients have to be there before they are unscaled and checked for infinities.
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            if args.use_adasum and hvd.size() > 1:
                scaler.step(optimizer)
            else:
                with optimizer.skip_synchronize():
                    scaler.step(optimizer)
            scaler.update()
        if index % args.log_interval == 0 and hvd.rank() == 0:
            print(
                f"Train Epoch: {epoch} [{index * len(data)}/{len(sampler)} "
                f"({100.0 * index / len(loader):.0f}%)]\tLoss: {loss.item():.6f}",
                flush=True,
            )


def metric_average(value, name):
    """The mean of a number over all processes."""
    return hvd.allreduce(torch.tensor(value), name=name).item()


def test(model, loader, device):
    """Test on every process's part, and average; return the accuracy."""
    model.eval()
    loss, right, seen = 0.0, 0.0, 0
    with torch.no_grad():
        for data, target in loader:
            output = model(data.to(device))
            target = target.to(device)
            loss += F.nll_loss(output, target, reduction="sum").item()
            right += (output.argmax(1) == target).float().sum().item()
            seen += len(target)
    loss = metric_average(loss / seen, "avg_loss")
    accuracy = metric_average(right / seen, "avg_accuracy")
    if hvd.rank() == 0:
        print(
            f"\nTest set: Average loss: {loss:.4f}, Accuracy: {100.0 * accuracy:.2f}%\n", flush=True
        )
    return accuracy


def main(args):
    """The program of every process."""
    hvd.init()
    torch.manual_seed(args.seed)
    wanted = "cpu" if args.no_cuda else args.device
    cuda = torch.cuda.is_available() if wanted is None else wanted == "cuda"
    if cuda:
        # One GPU per process.
        torch.cuda.set_device(hvd.local_rank())
        torch.cuda.manual_seed(args.seed)
    device = torch.device("cuda" if cuda else "cpu")
    # Processes share the machine's cores.
    torch.set_num_threads(1)

    train_data, test_data = load_data(args)
    # Each process sees its own part of the data.
    train_sampler = DistributedSampler(train_data, num_replicas=hvd.size(), rank=hvd.rank())
    train_loader = DataLoader(train_data, batch_size=args.batch_size, sampler=train_sampler)
    test_sampler = DistributedSampler(test_data, num_replicas=hvd.size(), rank=hvd.rank())
    test_loader = DataLoader(test_data, batch_size=args.test_batch_size, sampler=test_sampler)

    model = Net().to(device)
    # More processes mean larger batches, hence larger steps.
    lr_scaler = hvd.size()
    if args.use_adasum:
        # Adasum needs no larger rate, but with NCCL it averages the processes of each host first.
        lr_scaler = hvd.local_size() if cuda and hvd.nccl_built() else 1
    optimizer = optim.SGD(model.parameters(), lr=args.lr * lr_scaler, momentum=args.momentum)

    # All processes start from the same weights.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=compression,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )
    scaler = torch.amp.GradScaler(device.type) if args.use_mixed_precision else None

    for epoch in range(1, args.epochs + 1):
        train_epoch(epoch, model, optimizer, train_loader, train_sampler, scaler, args, device)
        test(model, test_loader, device)
        # Checkpoints are written by one process only, or they would overwrite each other.
        if args.data_dir and hvd.rank() == 0:
            os.makedirs(args.data_dir, exist_ok=True)
            torch.save(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
                os.path.join(args.data_dir, f"checkpoint-{epoch}.pth.tar"),
            )


if __name__ == "__main__":
    arguments = parse_args()
    if arguments.num_proc:
        horovod.run(
            main,
            args=(arguments,),
            np=arguments.num_proc,
            hosts=arguments.hosts,
            use_gloo=arguments.communication == "gloo",
            use_mpi=arguments.communication == "mpi",
        )
    else:
        main(arguments)
