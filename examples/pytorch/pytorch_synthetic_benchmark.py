"""Images per second of a residual network on made-up data, on any number of processes.

horovodrun -np 2 python pytorch_synthetic_benchmark.py
"""

import argparse
import timeit

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn, optim

import horovod.torch as hvd


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class SmallResNet(nn.Module):
    """A residual network that needs no other package; `depth` blocks in each of four stages."""

    def __init__(self, depth, width=16, classes=1000):
        super().__init__()
        stages: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1, bias=False)]
        channels = width
        for stage in range(4):
            outputs = width * 2**stage
            for i in range(depth):
                stages.append(Block(channels, outputs, 2 if i == 0 and stage else 1))
                channels = outputs
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels, classes)

    def forward(self, x):
        return self.head(self.stages(x).mean((2, 3)))


MODELS = {
    "tiny": lambda: SmallResNet(1, 8),
    "small": lambda: SmallResNet(2, 16),
    "medium": lambda: SmallResNet(3, 32),
}


def build_model(name):
    """One of ours, or one of torchvision's where that is installed."""
    if name in MODELS:
        return MODELS[name]()
    try:
        from torchvision import models
    except ImportError:
        known = ", ".join(MODELS)
        raise SystemExit(
            f"--model {name} needs torchvision; without it there are: {known}"
        ) from None
    # The second classifier of Inception needs larger images than the rest of it.
    options = {"aux_logits": False, "init_weights": True} if name == "inception_v3" else {}
    return getattr(models, name)(**options)


def main():
    """Measure and report from rank 0."""
    parser = argparse.ArgumentParser(
        description="PyTorch Synthetic Benchmark",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")
    parser.add_argument(
        "--no-allreduce", action="store_true", help="train each rank alone, for comparison"
    )
    parser.add_argument(
        "--model", default="small", help="tiny, small, medium, or one of torchvision"
    )
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--num-warmup-batches", type=int, default=10)
    parser.add_argument("--num-batches-per-iter", type=int, default=10)
    parser.add_argument("--num-iters", type=int, default=10)
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], help="where to compute; a GPU where PyTorch finds one"
    )
    parser.add_argument("--no-cuda", action="store_true", help="as --device cpu")
    parser.add_argument("--use-adasum", action="store_true", help="combine steps with Adasum")
    args = parser.parse_args()

    hvd.init()
    wanted = "cpu" if args.no_cuda else args.device
    cuda = torch.cuda.is_available() if wanted is None else wanted == "cuda"
    if cuda:
        # One GPU per process.
        torch.cuda.set_device(hvd.local_rank())
    device = torch.device("cuda" if cuda else "cpu")

    model = build_model(args.model).to(device)
    lr_scaler = hvd.size()
    if args.use_adasum:
        # Adasum needs no larger rate, but with NCCL it averages the processes of each host first.
        lr_scaler = hvd.local_size() if cuda and hvd.nccl_built() else 1
    optimizer = optim.SGD(model.parameters(), lr=0.01 * lr_scaler)
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    if not args.no_allreduce:
        optimizer = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=model.named_parameters(),
            compression=compression,
            op=hvd.Adasum if args.use_adasum else hvd.Average,
        )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    shape = (args.batch_size, 3, args.image_size, args.image_size)
    data = torch.randn(*shape, device=device)
    target = torch.randint(0, 1000, (args.batch_size,), device=device)

    def benchmark_batches(count):
        for _ in range(count):
            optimizer.zero_grad()
            F.cross_entropy(model(data), target).backward()
            optimizer.step()
        if cuda:
            torch.cuda.synchronize()  # until here all of it was only queued

    def log(text):
        if hvd.rank() == 0:
            print(text, flush=True)

    kind = "GPU" if cuda else "CPU"
    log(f"Model: {args.model}")
    log(f"Batch size: {args.batch_size}")
    log(f"Number of {kind}s: {hvd.size()}")
    log("Running warmup...")
    benchmark_batches(args.num_warmup_batches)
    hvd.barrier()
    log("Running benchmark...")
    img_secs = []
    for number in range(args.num_iters):
        seconds = timeit.timeit(lambda: benchmark_batches(args.num_batches_per_iter), number=1)
        img_secs.append(args.batch_size * args.num_batches_per_iter / seconds)
        log(f"Iter #{number}: {img_secs[-1]:.2f} img/sec per {kind}")
    rates = np.mean(hvd.allgather_object(img_secs), axis=0)
    mean, spread = np.mean(rates), 1.96 * np.std(rates)
    log(f"Img/sec per {kind}: {mean:.2f} +-{spread:.2f}")
    log(
        f"Total img/sec on {hvd.size()} {kind}(s): "
        f"{hvd.size() * mean:.2f} +-{hvd.size() * spread:.2f}"
    )


if __name__ == "__main__":
    main()
