"""Cost of communication on this machine's GPUs, against training without it and against PyTorch's DDP over NCCL.

Usage: python bench/gpu.py [--models M ...] [--batch-size N] [--blocks B] [--limit S] [--device cuda] [--json FILE]

One rank first, whose gradients take the way of a reduction all the same: the host's time for handing over a tensor, the
time of a step against plain PyTorch, memory beside PyTorch's. Then one rank on each GPU, or two on the only one, where
NCCL allows it: steps against DDP. Two ranks on one GPU show that it works, not how fast it is. `--device
cpu` runs the same where there is no GPU, to see that the benchmark works.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median

import launch
import torch
from processes import unwind_on_sigterm

from horovod import _core

# NCCL's permission for two ranks on one GPU, which then must leave each other room.
ON_ONE_GPU = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4"}
SUBMISSION_GOAL_US = 5
STEP_GOAL = 1.01
MEMORY_GOAL_BYTES = 16 << 20


def measure(peer: str, ranks: int, options: argparse.Namespace, env: dict[str, str]) -> dict:
    """One run of a peer: medians, and of the steps by model and variant also the spread."""
    found: dict = {"ranks": ranks, "peer": peer, "steps": {}}
    calls: dict[str, list[float]] = {"latency_us": [], "submission_us": []}
    model = ""
    arguments = ("--models", *options.models, "--batch-size", str(options.batch_size))
    for record in launch.run(
        peer,
        ranks,
        "gpu_rank.py",
        "--peer",
        peer,
        "--device",
        options.device,
        "--blocks",
        str(options.blocks),
        *arguments,
        limit_s=options.limit,
        env=env,
    ):
        model = record.get("model", model)
        if "variant" in record:
            variants = found["steps"].setdefault(model, {})
            variants.setdefault(record["variant"], []).append(record["seconds"])
        elif "bytes_beside" in record:
            found["bytes_beside"] = record["bytes_beside"]
        for name, times in calls.items():
            if name in record:
                times.append(record[name])
    found |= {name: median(times) for name, times in calls.items()}
    return found


def steps(found: dict) -> list[str]:
    """Each variant's step, against the first."""
    lines = []
    for model, variants in found["steps"].items():
        base = median(next(iter(variants.values())))
        for variant, seconds in variants.items():
            middle = median(seconds)
            lines.append(
                f"  {model}, {variant}: {middle * 1e3:.2f} ms a step ({min(seconds) * 1e3:.2f} to "
                f"{max(seconds) * 1e3:.2f}), {middle / base:.3f} of {next(iter(variants))}"
            )
    return lines


def summary(found: dict) -> list[str]:
    """A run in words."""
    return [
        f"{found['peer']}, {found['ranks']} ranks",
        f"  4 B from call to result: {found['latency_us']:.1f} us",
        f"  the host hands a tensor over in {found['submission_us']:.2f} us",
        f"  memory beside PyTorch's for 4 B and 32 MiB: {found['bytes_beside'] / 2**20:.0f} MiB",
        *steps(found),
    ]


def goals(ours: dict, peer: dict | None) -> list[str]:
    """The goals of one rank."""
    lines = [
        _against(
            f"{ours['submission_us']:.2f} us a tensor", ours["submission_us"], SUBMISSION_GOAL_US
        )
    ]
    for model, variants in ours["steps"].items():
        plain = variants["plain"] + variants["plain again"]
        ratio = median(variants["horovod"]) / median(plain)
        noise = max(median(variants[v]) / median(plain) for v in ("plain", "plain again"))
        text = f"{model}: a step {ratio:.4f} of plain PyTorch's, equal runs up to {noise:.4f}"
        lines.append(_against(text, ratio / noise, STEP_GOAL))
    if peer is not None:
        more = ours["bytes_beside"] - peer["bytes_beside"]
        text = f"{more / 2**20:.0f} MiB of GPU memory more than torch.distributed"
        lines.append(_against(text, more, MEMORY_GOAL_BYTES))
    return lines


def _against(text: str, value: float, goal: float) -> str:
    return f"{text}: {'reached' if value <= goal else 'not reached'}"


def against_ddp(ours: dict, ddp: dict) -> list[str]:
    """Steps of ours over those of DDP."""
    lines = []
    for model, variants in ours["steps"].items():
        ratio = median(variants["horovod"]) / median(ddp["steps"][model]["ddp"])
        lines.append(f"{model}, {ours['ranks']} ranks: a step {ratio:.3f} of DDP's")
    return lines


def attempt(peer: str, ranks: int, options: argparse.Namespace, env: dict[str, str]) -> dict | None:
    """A run, told at once; None if it failed, which is told, too."""
    try:
        found = measure(peer, ranks, options, env)
    except launch.PeerFailed as failure:
        print(failure, flush=True)
        return None
    print("\n".join(summary(found)), flush=True)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["resnet50", "transformer"])
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=8, help="turns of each variant")
    parser.add_argument("--limit", type=float, default=120, help="seconds a run may take")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args()
    unwind_on_sigterm()
    gpus = torch.cuda.device_count() if options.device == "cuda" else 1
    if not gpus:
        parser.error("PyTorch finds no GPU; --device cpu shows whether the benchmark works")
    demanded: dict[str, str] = {}
    can_share = True
    if options.device == "cuda":
        nccl = torch.cuda.nccl.version()
        name, version = torch.cuda.get_device_name(0), ".".join(map(str, nccl))
        print(f"{gpus} x {name}, PyTorch {torch.__version__}, NCCL {version}")
        demanded = {"HOROVOD_GPU_OPERATIONS": "NCCL"}
        can_share = nccl >= _core.NCCL_SHARES_GPUS_SINCE

    alone = attempt("horovod", 1, options, demanded)
    runs = [alone, attempt("ddp", 1, options, {})]
    summary = goals(alone, runs[1]) if alone else []
    if gpus > 1 or can_share:
        ranks = max(gpus, 2)
        env = ON_ONE_GPU if options.device == "cuda" and gpus == 1 else {}
        together = attempt("horovod", ranks, options, demanded | env)
        ddp = attempt("ddp", ranks, options, env)
        runs += [together, ddp]
        if together and ddp:
            summary += against_ddp(together, ddp)
    else:
        summary.append("not measured: two ranks on one GPU, which this NCCL refuses")
    print("\n".join(["", *summary]))
    if options.json:
        options.json.write_text(json.dumps([run for run in runs if run]))
    if not all(runs):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
