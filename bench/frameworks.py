"""Cost of a reduction in each framework: ours, PyTorch's path, and the framework's own collectives.

Usage: python bench/frameworks.py [-np N] [--rounds K] [--peers P ...] [--json FILE]

Peers take turns in rounds; a call takes as long as on the slowest rank. TensorFlow's own is
`MultiWorkerMirroredStrategy`, JAX's own its CPU collectives between
`jax.distributed` processes. The programs of Rust are built with cargo (rust_programs.py).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from statistics import median

import launch
import rust_programs
import tables
from frameworks_rank import APPLIED, COMPUTED, NOT_REDUCED, REDUCED
from processes import output_of, unwind_on_sigterm

# Each with the package that it needs, if it is of Python.
PEERS = {
    "torch": "torch",
    "tensorflow": "tensorflow",
    "tensorflow-jit": "tensorflow",
    "keras": "keras",
    "mirrored": "tensorflow",
    "jax": "jax",
    "jax-distributed": "jax",
    "mxnet": "mxnet",
    "rust": "",
    "candle": "",
}
OWN = {"tensorflow": "mirrored", "tensorflow-jit": "mirrored", "jax": "jax-distributed"}
LIMIT_S = 300
# MXNet needs an older NumPy than all others.
MXNET_PYTHON = Path(__file__).resolve().parents[1] / ".venv-mxnet" / "bin" / "python"

# Steps of a CNN, by peer.
STEPS = ("alone", "horovod", "mirrored")

# Added import time of a module over its framework, and its limit, in seconds.
IMPORTS = {
    "horovod.tensorflow": ("tensorflow", 0.1),
    "horovod.jax": ("jax", 0.05),
}
IMPORT_PROGRAM = """
import importlib, time
importlib.import_module({framework!r})
begin = time.perf_counter()
importlib.import_module({module!r})
print(time.perf_counter() - begin)
"""


def measure(ranks: int, rounds: int, budget_s: float, peers: list[str] | None = None) -> dict:
    """Seconds by peer and case."""
    found: dict = {"ranks": ranks, "seconds": {}, "skipped": {}, "steps": {}, "imports": {}}
    chosen = peers or list(PEERS)
    for peer in chosen:
        if peer == "mxnet":
            if not MXNET_PYTHON.exists():
                found["skipped"][peer] = "make .venv-mxnet makes the environment that it needs"
        elif peer in rust_programs.PACKAGES:
            if why := rust_programs.build(peer):
                found["skipped"][peer] = why
        elif importlib.util.find_spec(PEERS[peer]) is None:
            found["skipped"][peer] = f"{PEERS[peer]} is not installed"
    for _ in range(rounds):
        for peer in chosen:
            if peer in found["skipped"]:
                continue
            words = ("frameworks_rank.py", "--peer", peer, "--budget", str(budget_s))
            cases = found["seconds"].setdefault(peer, {})
            for record in _run(peer, ranks, *words):
                cases.setdefault(record["case"], []).extend(record["seconds"])
        if "keras" not in chosen or "keras" in found["skipped"]:
            continue
        for peer in STEPS:
            (record,) = _run(peer, ranks, "cnn_rank.py", "--peer", peer)
            found["steps"].setdefault(peer, []).extend(record["seconds"])
            found["parameters"] = record["parameters"]
    for module, (framework, _) in IMPORTS.items():
        if framework in chosen and framework not in found["skipped"]:
            found["imports"][module] = [_added_by_import(framework, module) for _ in range(5)]
    return found


def _run(peer: str, ranks: int, *words: str) -> list[dict]:
    if peer in rust_programs.PACKAGES:
        program = str(rust_programs.program(peer))
        arguments = words[words.index("--budget") :]
        return launch.run("horovod", ranks, program, *arguments, limit_s=LIMIT_S, python=None)
    if peer != "mxnet":
        return launch.run("horovod", ranks, *words, limit_s=LIMIT_S)
    # Its interpreter sees this one's horovod, and nothing else.
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        spec = importlib.util.find_spec("horovod")
        if not spec or not spec.submodule_search_locations:
            raise launch.PeerFailed("horovod is not installed")
        Path(folder, "horovod").symlink_to(spec.submodule_search_locations[0])
        env = {"PYTHONPATH": folder}
        python = str(MXNET_PYTHON)
        return launch.run("horovod", ranks, *words, limit_s=LIMIT_S, python=python, env=env)


def _added_by_import(framework: str, module: str) -> float:
    program = IMPORT_PROGRAM.format(framework=framework, module=module)
    done = output_of([sys.executable, "-c", program], LIMIT_S)
    if done.returncode:
        raise launch.PeerFailed(f"import {module}: {done.stderr[-2000:]}")
    return float(done.stdout)


def rows(found: dict) -> list[str]:
    """Tables: milliseconds of each case, then the ratios that there are goals for."""
    seconds = found["seconds"]
    names = list(dict.fromkeys(name for cases in seconds.values() for name in cases))
    lines = [tables.row("case, ms", *seconds), tables.row(*["---"] * (len(seconds) + 1))]
    for name in names:
        cells = [tables.milliseconds(cases.get(name)) for cases in seconds.values()]
        lines.append(tables.row(name, *cells))
    if steps := found.get("steps"):
        millions = found["parameters"] / 1e6
        lines += ["", f"Step of a Keras CNN of {millions:.1f} million parameters:", ""]
        lines += [tables.row("ranks of", "ms"), tables.row("---", "---")]
        lines += [tables.row(who, tables.milliseconds(times)) for who, times in steps.items()]
    lines += ["", tables.row("goal", "measured", "at most"), tables.row(*["---"] * 3)]
    lines += [tables.row(*goal) for goal in goals(found)]
    return lines + [f"\nNot measured: {who}: {why}." for who, why in found["skipped"].items()]


def goals(results: dict) -> list[tuple[str, str, str]]:
    """Each goal with its figure, of medians, and its limit with whether it is reached."""
    found = []
    seconds = results["seconds"]

    def goal(name: str, value: float | None, limit: float, unit: str = "") -> None:
        if value is not None:
            mark = tables.REACHED if value <= limit else tables.MISSED
            found.append((name, f"{value:.2f}{unit}", f"{limit:g}{unit} {mark}"))

    def of(peer: str, case: str) -> float | None:
        times = seconds.get(peer, {}).get(case)
        return median(times) if times else None

    def ratio(a: float | None, b: float | None) -> float | None:
        return None if a is None or not b else a / b

    def more(a: float | None, b: float | None) -> float | None:
        return None if a is None or b is None else a - b

    large, in_place = of("torch", "64 MiB"), of("torch", "64 MiB, in place")
    gradients = of("torch", "161 gradients")
    for peer, own in OWN.items():
        extra = more(of(peer, "4 B"), of(peer, "nothing"))
        limit = 20 if peer == "jax" else 25
        microseconds = None if extra is None else extra * 1e6
        goal(f"{peer}: 4 B, more than nothing", microseconds, limit, " us")
        goal(f"{peer}: 64 MiB / PyTorch's", ratio(of(peer, "64 MiB"), large), 1.15)
        forwarded = of(peer, "64 MiB, in place") or more(
            of(peer, "64 MiB, computed"), of(peer, "computing it")
        )
        goal(f"{peer}: 64 MiB in place / PyTorch's", ratio(forwarded, in_place), 1.15)
        reduced = more(of(peer, REDUCED), of(peer, COMPUTED))
        goal(
            f"{peer}: 161 gradients, computing excluded / PyTorch's", ratio(reduced, gradients), 1.3
        )
        whole, theirs = of(peer, "161 gradients"), of(own, "161 gradients")
        goal(f"{peer}: 161 gradients / the framework's own", ratio(whole, theirs), 1 / 3)
    applied = more(of("keras", APPLIED), of("keras", NOT_REDUCED))
    goal("keras: apply of 161 gradients / PyTorch's", ratio(applied, gradients), 1.3)
    goal("mxnet: 64 MiB / PyTorch's", ratio(of("mxnet", "64 MiB"), large), 1.15)
    goal(
        "mxnet: 64 MiB in place / PyTorch's", ratio(of("mxnet", "64 MiB, in place"), in_place), 1.15
    )
    goal("mxnet: 161 gradients / PyTorch's", ratio(of("mxnet", "161 gradients"), gradients), 1.4)
    steps = {who: median(times) for who, times in results.get("steps", {}).items()}
    ours = steps.get("horovod")
    goal("a CNN's step / MultiWorkerMirrored's", ratio(ours, steps.get("mirrored")), 0.8)
    goal("a CNN's step / computing alone", ratio(ours, steps.get("alone")), 1.15)
    over_engine = more(of("rust", "4 B"), of("rust", "4 B, the engine's submit and wait"))
    microseconds = None if over_engine is None else over_engine * 1e6
    goal("rust: 4 B, more than the engine's submit and wait", microseconds, 1.5, " us")
    goal(
        "rust: 64 MiB in place / PyTorch's in place",
        ratio(of("rust", "64 MiB, in place"), in_place),
        1.03,
    )
    # 1 us for each tensor is allowed.
    many, one = of("candle", "2,000 tensors of 1,000"), of("candle", "1 tensor of 2,000,000")
    goal("candle: 2,000 tensors, without 1 us each / one tensor", ratio(more(many, 2e-3), one), 1.3)
    step, flat = of("candle", "a CNN's step"), of("candle", "a CNN's step with one flat allreduce")
    goal("candle: a CNN's step / with one flat allreduce", ratio(step, flat), 1.06)
    for module, times in results.get("imports", {}).items():
        framework, limit_s = IMPORTS[module]
        goal(f"import {module}, after {framework}", median(times) * 1e3, limit_s * 1e3, " ms")
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-np", "--num-proc", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2, help="runs of each peer")
    parser.add_argument("--budget", type=float, default=1.0, help="seconds for a case")
    parser.add_argument("--peers", nargs="+", choices=list(PEERS))
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args()
    unwind_on_sigterm()
    found = measure(options.num_proc, options.rounds, options.budget, options.peers)
    print("\n".join(rows(found)))
    if options.json:
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
