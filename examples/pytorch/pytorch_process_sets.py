"""Two models at once: even ranks train one, odd ranks the other, all in one job.

horovodrun -np 4 python pytorch_process_sets.py
"""

import argparse

import torch

import horovod.torch as hvd


def main():
    """The program of every process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cpu")
    args = parser.parse_args()

    hvd.init(process_sets="dynamic")
    if args.device == "cuda":
        # One GPU per process.
        torch.cuda.set_device(hvd.local_rank())
    even = (
        hvd.add_process_set(range(0, hvd.size(), 2)) if hvd.size() > 1 else hvd.global_process_set
    )
    sets = [even]
    if hvd.size() > 1:
        sets.append(hvd.add_process_set(range(1, hvd.size(), 2)))
    number = hvd.rank() % len(sets)
    mine = sets[number]

    # Set 0 learns y = x, set 1 learns y = -x; each rank sees its own x.
    slope = 1.0 - 2.0 * number
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(1, 1).to(args.device)
    assert mine.ranks is not None
    for param in model.parameters():
        hvd.broadcast_(param.data, root_rank=mine.ranks[0], process_set=mine)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.2),
        named_parameters=model.named_parameters(),
        process_set=mine,
    )
    for _ in range(args.steps):
        x = torch.rand(16, 1).to(args.device) * 2 - 1
        optimizer.zero_grad()
        (model(x) - slope * x).pow(2).mean().backward()
        optimizer.step()

    learned = hvd.allgather(model.weight.data)
    if hvd.rank() == 0:
        for rank, weight in enumerate(learned.flatten().tolist()):
            print(f"rank {rank}: set {rank % len(sets)}, slope {weight:+.3f}", flush=True)
    for index, weight in enumerate(learned.flatten().tolist()):
        other = index % len(sets)
        assert abs(weight - (1.0 - 2.0 * other)) < 0.2 or args.steps < 50, "not learned"


if __name__ == "__main__":
    main()
