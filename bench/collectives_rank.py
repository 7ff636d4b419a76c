"""One rank of the collectives benchmark: the chosen cases through a peer's public API.

Before its repeats are timed each case runs once on data of which the result is known, and is checked.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from cases import CASES, Case
from launch import Report
from peers import PEERS, Peer, lacks

WARM_UP = 5
REPEATS_MIN = 3


def tensors_of(case: Case, size: int, value: float) -> list[torch.Tensor]:
    """The case's tensors, all elements alike."""
    times = size if case.rows_per_rank else 1
    dtype = getattr(torch, case.dtype)
    tensors = [
        torch.full((first * times, *rest), value, dtype=dtype) for first, *rest in case.shapes
    ]
    if not case.order:
        return tensors
    places = [case.order.index(dim) for dim in range(len(case.order))]
    return [tensor.permute(case.order).contiguous().permute(places) for tensor in tensors]


def check(peer: Peer, case: Case) -> None:
    """Run the case on rank numbers counted from 1 and stop everything if a result is wrong."""
    mine, size = float(peer.rank + 1), peer.size
    tensors = tensors_of(case, size, mine)
    result = operation_of(peer, case, "check", 1)(tensors)
    everybody = torch.arange(1.0, size + 1)
    expected = {
        "allreduce": [everybody.sum()] * len(tensors),
        "chain": [everybody.sum()],
        "broadcast": [torch.tensor(1.0)],
        "allgather": [everybody.repeat_interleave(tensors[0].shape[0])[:, None]],
        "reducescatter": [everybody.sum()],
        "alltoall": [everybody.repeat_interleave(tensors[0].shape[0] // size)[:, None]],
    }[case.operation]
    results = tensors if case.operation in ("allreduce", "broadcast", "chain") else [result]
    for index, (got, want) in enumerate(zip(results, expected, strict=True)):
        if not bool((got == want.to(got.dtype)).all()):
            raise SystemExit(f"{case.name}: rank {peer.rank} got a wrong result in tensor {index}")


def operation_of(
    peer: Peer, case: Case, tag: str, chained: int
) -> Callable[[list[torch.Tensor]], object]:
    """The case's method, as a function of the tensors."""
    method = getattr(peer, case.operation)
    words = (tag, chained) if case.operation == "chain" else (tag,)
    return lambda tensors: method(tensors, *words)


def repeats_that_fit(peer: Peer, seconds: float, most: int, budget_s: float) -> int:
    """Rank 0's decision, the same on all ranks."""
    count = max(REPEATS_MIN, min(most, math.ceil(budget_s / max(seconds, 1e-9))))
    decided = torch.tensor([float(count)])
    peer.broadcast([decided], "repeats")
    return int(decided)


def measure(peer: Peer, case: Case, repeats: int, budget_s: float) -> list[float]:
    """Seconds of each repeat; all ranks start together."""
    tensors = tensors_of(case, peer.size, 1.0)
    operation = operation_of(peer, case, case.name, case.chained)

    def run() -> object:
        return operation(tensors)

    timed(peer, run)
    first = timed(peer, run)
    count = repeats_that_fit(peer, first, repeats * case.repeats, budget_s)
    for _ in range(min(WARM_UP, count) - 2):
        run()
    return [timed(peer, run) / case.chained for _ in range(count)]


def timed(peer: Peer, run: Callable[[], object]) -> float:
    """Seconds of one call, from when all ranks are ready."""
    peer.barrier()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    """Run the cases and report them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--peer", choices=sorted(PEERS), required=True)
    parser.add_argument("--cases", nargs="+", required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--budget", type=float, required=True, help="seconds for a case")
    options = parser.parse_args()
    torch.set_num_threads(1)
    peer = PEERS[options.peer]()
    report = Report(options.out, peer.rank)
    for case in CASES:
        if case.name in options.cases and not lacks(options.peer, case):
            check(peer, case)
            seconds = measure(peer, case, options.repeats, options.budget)
            report.add(case=case.name, seconds=seconds)
    report.done()
    peer.barrier()
    peer.close()


if __name__ == "__main__":
    main()
