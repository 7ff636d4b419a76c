"""Does communication hide behind computation? Step time of a real model: alone, with ours, with PyTorch's DDP.

Usage: python bench/overlap.py [-np N] [--models M ...] [--rounds K] [--blocks B] [--json FILE]

Each peer's ranks take turns, five steps at a time, between copies of the model:

  compute   nobody communicates: the least that a step can take with this many processes side by side
  lockstep  nobody sends a byte, but each step ends when the slowest rank's does: the least for training together
  horovod   DistributedOptimizer: gradients travel while those of earlier layers are computed
  after     the same gradients sent when backward is done: what horovod's overlap saves
  ddp       torch.nn.parallel.DistributedDataParallel over Gloo

and peers take turns in rounds, so that drift of the machine hits all alike.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import launch
import tables
from processes import unwind_on_sigterm

PEERS = ("horovod", "gloo")
LIMIT_S = 120


def measure(model: str, ranks: int, rounds: int, blocks: int) -> dict:
    """Seconds of every step, by peer and variant, and of the communication alone."""
    found: dict = {"model": model, "ranks": ranks, "steps": {}, "alone": {}}
    arguments = ("--model", model, "--blocks", str(blocks))
    for _ in range(rounds):
        for peer in PEERS:
            for record in launch.run(
                peer, ranks, "overlap_rank.py", "--peer", peer, *arguments, limit_s=LIMIT_S
            ):
                if "variant" in record:
                    steps = found["steps"].setdefault(peer, {}).setdefault(record["variant"], [])
                    steps.extend(record["steps"])
                elif "alone" in record:
                    found["alone"].setdefault(peer, []).append(record["alone"])
                else:
                    found |= record
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-np", "--num-proc", type=int, default=2)
    parser.add_argument("--models", nargs="+", default=["transformer", "convnet"])
    parser.add_argument("--rounds", type=int, default=2, help="runs of each peer")
    parser.add_argument("--blocks", type=int, default=4, help="turns of each variant in a run")
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args()
    unwind_on_sigterm()
    found = []
    for model in options.models:
        found.append(measure(model, options.num_proc, options.rounds, options.blocks))
        print("\n".join(tables.overlap(found[-1])), end="\n\n", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
