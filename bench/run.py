"""Measures everything in one go, prints it with ratios and goals, and writes docs/performance.md's tables and plots.

Usage: python bench/run.py [--quick] [--parts P ...] [-np N ...] [--groups G ...] [--rounds K] [--no-docs]

Each part stores its figures in bench-output/, and the report is made of all that is there: parts, numbers of ranks
and groups of cases can be measured one at a time, as a busy machine allows. A quick run measures too little to be
recorded: it keeps to a folder of its own and leaves docs/ alone.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

import cases
import collectives
import frameworks
import idle
import launch
import metrics
import overlap
import report
import startup
from processes import started, unwind_on_sigterm
from results import FOLDER, ROOT, Results, machine

PARTS = ("collectives", "frameworks", "overlap", "startup", "idle", "metrics", "scaling", "hosts")


def run_collectives(results: Results, options: argparse.Namespace) -> None:
    """The cases of cases.py, on each number of ranks."""
    chosen = [
        case
        for case in cases.CASES
        if case.group in options.groups and (case.quick or not options.quick)
    ]
    for ranks in options.num_proc:
        part = f"collectives-{ranks}"
        rounds = options.rounds or (1 if options.quick else 3)
        repeats, budget_s = (9, 0.3) if options.quick else (15, 1.0)
        found = collectives.measure(chosen, ranks, rounds, repeats, budget_s, results.folder)
        # Cases that were not measured this time keep their figures.
        before = results.load(part) or {}
        earlier = before.get("seconds", {})
        if options.add:
            for name, peers in found["seconds"].items():
                for who, seconds in earlier.get(name, {}).items():
                    peers[who] = seconds + peers.get(who, [])
        found["seconds"] = earlier | found["seconds"]
        noticed = dict.fromkeys([*before.get("disturbed", ()), *launch.disturbances])
        results.store(part, found | {"machine": machine(), "disturbed": list(noticed)})


def run_frameworks(results: Results, options: argparse.Namespace) -> None:
    """Reductions in each framework."""
    rounds, budget_s = (1, 0.2) if options.quick else (3, 1.0)
    before = len(launch.disturbances)
    peers = [peer for peer in frameworks.PEERS if peer != "candle" or not options.quick]
    found = frameworks.measure(2, options.rounds or rounds, budget_s, peers)
    if options.quick:
        found["skipped"]["candle"] = "a quick run does not build it, which takes minutes"
    noticed = list(dict.fromkeys(launch.disturbances[before:]))
    results.store("frameworks", found | {"machine": machine(), "disturbed": noticed})


def run_overlap(results: Results, options: argparse.Namespace) -> None:
    """Training steps of two models."""
    models, rounds, blocks = (
        (["transformer"], 1, 2) if options.quick else (["transformer", "convnet"], 3, 4)
    )
    rounds = options.rounds or rounds
    found = [overlap.measure(model, 2, rounds, blocks) for model in models]
    results.store("overlap", found)


def run_startup(results: Results, options: argparse.Namespace) -> None:
    """Start of a job."""
    results.store("startup", startup.measure(2, options.rounds or (2 if options.quick else 5)))


def run_idle(results: Results, options: argparse.Namespace) -> None:
    """Cost of an idle runtime."""
    pairs, idle_s = (4, 2.0) if options.quick else (12, 5.0)
    results.store("idle", [idle.measure(ranks, pairs, idle_s) for ranks in (2,)])


def run_metrics(results: Results, options: argparse.Namespace) -> None:
    """Cost of measuring a job."""
    workloads, pairs, seconds = (
        (["many", "training"], 4, 0.3) if options.quick else (metrics.WORKLOADS, 12, 0.4)
    )
    found = [metrics.measure(workload, 2, pairs, seconds) for workload in workloads]
    rank_0 = metrics.measure_rank_0(64, *((1, 2.0) if options.quick else (4, 5.0)))
    results.store("metrics", {"workloads": found, "rank_0": rank_0})


def run_scaling(results: Results, options: argparse.Namespace) -> None:
    """The simulated curves over the number of ranks; the example prints a JSON object a line."""
    example = ROOT / "crates" / "horovod-sim" / "examples" / "scaling.rs"
    if not example.exists() or not shutil.which("cargo"):
        print(f"skipped: scaling: needs cargo and {example.name}")
        return
    words = ["cargo", "run", "--quiet", "--release", "--locked", "-p", "horovod-sim"]
    words += ["--example", "scaling"]
    done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    results.store("scaling", lines)


def run_hosts(results: Results, options: argparse.Namespace) -> None:
    """Two hosts of network namespaces; the program says itself why it cannot run."""
    program = Path(__file__).with_name("hosts.py")
    words = [sys.executable, str(program), *(["--quick"] if options.quick else [])]
    with started(words, stdout=subprocess.PIPE, text=True) as process:
        out, _ = process.communicate()
    if process.returncode:
        print(f"skipped: hosts: {program.name} ended with exit code {process.returncode}")
    elif "|" in out:
        results.store("hosts", out.splitlines())
    else:
        print(f"skipped: hosts: {out.strip()}")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer cases and repeats; not recorded"
    )
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("-np", "--num-proc", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--groups", nargs="+", choices=cases.GROUPS, default=cases.GROUPS)
    parser.add_argument("--rounds", type=int, help="turns of each peer")
    parser.add_argument(
        "--add", action="store_true", help="collectives: to the figures that are there"
    )
    parser.add_argument("--no-docs", action="store_true", help="leave docs/ alone")
    return parser.parse_args()


def main() -> None:
    """Measure, print, record."""
    options = parse()
    unwind_on_sigterm()
    results = Results(FOLDER / "quick" if options.quick else FOLDER)
    for part in options.parts:
        globals()[f"run_{part}"](results, options)
    recorded = not (options.quick or options.no_docs)
    pictures = ROOT / "docs" if recorded else results.folder
    lines = report.sections(results, pictures)
    print("\n" + "\n".join(lines))
    if recorded:
        report.write(ROOT / "docs" / "performance.md", lines)
        # The chart of README.md.
        subprocess.run([sys.executable, ROOT / "build_backend" / "docs_pictures.py"], check=True)


if __name__ == "__main__":
    main()
