"""Cost of an initialised but idle runtime: processor time, and throughput taken from computing.

Each rank multiplies matrices for a while with the runtime initialised, then as long after `shutdown`, and so on: in
one process, so that neither placement nor drift of the machine is taken for the runtime's cost.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import launch

LIMIT_S = 180
WINDOW_S = 0.7


def measure(ranks: int, pairs: int, idle_s: float) -> dict:
    """Shares of a processor that each idle rank burnt, and of its throughput that each computing rank kept."""
    arguments = ("--pairs", str(pairs), "--idle", str(idle_s))
    records = launch.run("horovod", ranks, "idle.py", *arguments, limit_s=LIMIT_S)
    return {"ranks": ranks, **{k: v for record in records for k, v in record.items()}}


def products_per_second(seconds: float) -> float:
    """How many products of matrices one thread computes."""
    import torch

    matrix = torch.randn(256, 256)
    count, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        matrix @ matrix
        count += 1
    return count / elapsed


def main() -> None:
    """One rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--pairs", type=int, required=True)
    parser.add_argument("--idle", type=float, required=True)
    options = parser.parse_args()

    import torch

    import horovod.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    hvd.allreduce(torch.ones(1 << 20))  # the data plane is set up as well
    rank = hvd.rank()
    hvd.barrier()
    before = time.process_time()
    time.sleep(options.idle)
    burnt = (time.process_time() - before) / options.idle
    shares = hvd.allgather_object(burnt)

    products_per_second(WINDOW_S)
    kept = []
    for pair in range(options.pairs):
        rates = {}
        # Which comes first changes from pair to pair: the second one never profits.
        for initialised in (True, False) if pair % 2 else (False, True):
            hvd.init()
            hvd.barrier()
            if not initialised:
                hvd.shutdown()
            rates[initialised] = products_per_second(WINDOW_S)
        kept.append(rates[True] / rates[False])
    hvd.init()
    everybody = [ratio for ratios in hvd.allgather_object(kept) for ratio in ratios]
    report = launch.Report(options.out, rank)
    report.add(idle=shares, kept=everybody)
    report.done()
    hvd.shutdown()


if __name__ == "__main__":
    sys.exit(main())
