"""Cost of `state.commit()`: per call and per training step, for a model of 100 MB, against a deep copy.

python bench/commit.py                    # one process
horovodrun -np 2 python bench/commit.py   # several, each with its own copy of the model
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable

import torch

import horovod.torch as hvd

LAYERS, WIDTH = 25, 1000  # 100 MB of float32


def median_ms(repeat: int, call: Callable[[], object]) -> float:
    """Median time of a call in milliseconds."""
    times = []
    for _ in range(repeat):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return round(statistics.median(times) * 1e3, 3)


def main() -> None:
    """Measure and let rank 0 print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1, help="compute threads of PyTorch")
    args = parser.parse_args()
    hvd.init()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, step=0)
    batch = torch.randn(64, WIDTH)

    def train(commit: bool) -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        if commit:
            state.commit()

    for _ in range(3):
        train(True)
    found = {"ranks": hvd.size(), "threads": args.threads}
    found["deepcopy_ms"] = median_ms(3, lambda: copy.deepcopy(model.state_dict()))
    found["check_host_updates_ms"] = median_ms(args.repeat * 10, state.check_host_updates)
    for name, background in (("foreground", False), ("background", True)):
        state.commit_in_background = background
        train(True)

        def commit_alone() -> None:
            state.commit()

        times = []
        for _ in range(args.repeat):
            times.append(median_ms(1, commit_alone))
            train(False)  # waits for what runs in the background
        found[f"{name}_commit_ms"] = round(statistics.median(times), 3)
    steps: dict[str, list[float]] = {"none": [], "foreground": [], "background": []}
    for _ in range(args.repeat):
        for name, measured in steps.items():
            state.commit_in_background = name == "background"
            train(name != "none")
            hvd.barrier()
            measured.append(median_ms(1, lambda n=name: train(n != "none")))
            hvd.barrier()
    for name, measured in steps.items():
        found[f"step_with_{name}_ms"] = round(statistics.median(measured), 1)
    if hvd.rank() == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
