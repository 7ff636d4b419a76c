"""A polynomial fitted on any number of processes: what Adasum does to the learning rate.

With `--op Average` the rate has to be found again for every number of processes; with `--op Adasum` the rate of
one process keeps working.
"""

import argparse

import numpy as np
import torch

import horovod.torch as hvd


def parse_args():
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Adasum on a small model")
    parser.add_argument("--mode", choices=["square", "cubic"], default="square")
    parser.add_argument("--op", choices=["Average", "Adasum"], default="Average")
    parser.add_argument("--learning_rate", type=float, default=0.1)
    parser.add_argument("--x_max", type=float, default=1.0, help="x is drawn from -x_max to x_max")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cpu")
    return parser.parse_args()


def main():
    """The program of every process."""
    args = parse_args()
    hvd.init()
    lr_scaler = 1
    if args.device == "cuda":
        # One GPU per process. On GPUs Adasum averages the processes of each host first, if there is NCCL.
        torch.cuda.set_device(hvd.local_rank())
        lr_scaler = hvd.local_size() if args.op == "Adasum" and hvd.nccl_built() else 1
    torch.manual_seed(42)
    np.random.seed(hvd.rank())
    op = hvd.Adasum if args.op == "Adasum" else hvd.Average
    powers = 3 if args.mode == "square" else 4
    wanted = torch.arange(1.0, powers + 1, device=args.device)
    weights = torch.zeros(powers, requires_grad=True, device=args.device)
    optimizer = torch.optim.SGD([weights], lr=args.learning_rate * lr_scaler)
    for step in range(1, args.steps + 1):
        x = torch.from_numpy(np.random.uniform(-args.x_max, args.x_max, 32)).float().to(args.device)
        features = torch.stack([x**power for power in range(powers)], dim=1)
        optimizer.zero_grad()
        loss = (features @ (weights - wanted)).pow(2).mean()
        loss.backward()
        # The gradient may also be reduced by hand.
        assert weights.grad is not None
        weights.grad.data = hvd.allreduce(weights.grad.data, op=op)
        optimizer.step()
        if step % max(1, args.steps // 10) == 0:
            mean = hvd.allreduce(loss.detach(), name="loss").item()
            if hvd.rank() == 0:
                print(f"step {step}: loss {mean:.6f}", flush=True)
    if hvd.rank() == 0:
        print("weights", [round(w, 3) for w in weights.tolist()], "wanted", wanted.tolist())


if __name__ == "__main__":
    main()
