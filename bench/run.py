"""Compare the collectives with other peers in one run and print a table of medians and ratios.

Usage: python bench/run.py [-np N] [--rounds K] [--json FILE]
Ours and the peers alternate, so that a drift of the machine's speed hits all of them alike.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

RANK_PROGRAM = Path(__file__).with_name("collectives.py")
# One peer's whole pass; far above what a pass takes.
PASS_LIMIT_SECONDS = 300


def launch_command(peer: str, ranks: int) -> list[str]:
    """The peer's own launcher and the rank program."""
    program = [str(RANK_PROGRAM), "--peer", peer]
    if peer == "horovod":
        launcher = Path(sys.executable).with_name("horovodrun")
        return [str(launcher), "-np", str(ranks), sys.executable, *program]
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(ranks),
        *program,
    ]


def one_pass(peer: str, ranks: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of every repeat by case."""
    done = subprocess.run(
        [*launch_command(peer, ranks), "--repeats", str(repeats)],
        capture_output=True,
        text=True,
        timeout=PASS_LIMIT_SECONDS,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"{peer} failed with code {done.returncode}:\n{done.stderr}")
    cases: dict[str, list[float]] = {}
    for line in done.stdout.splitlines():
        start = line.find('{"case"')
        if start >= 0:
            record = json.loads(line[start:])
            cases[record["case"]] = record["seconds"]
    return cases


def milliseconds(seconds: list[float]) -> str:
    """Median (minimum to maximum)."""
    low, middle, high = min(seconds), statistics.median(seconds), max(seconds)
    return f"{middle * 1e3:.3f} ({low * 1e3:.3f} to {high * 1e3:.3f})"


def main() -> None:
    """Run all passes, alternating, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-np", "--num-proc", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2, help="passes of each peer")
    parser.add_argument("--repeats", type=int, default=15, help="repeats of a case in a pass")
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args()

    seconds: dict[str, dict[str, list[float]]] = {"horovod": {}, "gloo": {}}
    for _ in range(options.rounds):
        for peer, cases in seconds.items():
            for case, values in one_pass(peer, options.num_proc, options.repeats).items():
                cases.setdefault(case, []).extend(values)

    machine = f"{os.cpu_count()} cores, {platform.machine()}, {options.num_proc} ranks"
    print(f"Milliseconds: median (minimum to maximum); {machine}\n")
    print("| case | horovod-rs | torch.distributed Gloo | Gloo / ours |")
    print("| --- | --- | --- | --- |")
    for case, ours in seconds["horovod"].items():
        theirs = seconds["gloo"][case]
        ratio = statistics.median(theirs) / statistics.median(ours)
        print(f"| {case} | {milliseconds(ours)} | {milliseconds(theirs)} | {ratio:.1f} |")
    if options.json:
        record = {"machine": machine, "num_proc": options.num_proc, "seconds": seconds}
        options.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
