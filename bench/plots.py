"""Pictures of what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from cases import CASES, byte_text
from tables import LABELS, OVERLAP_LABELS

COLOURS = {"horovod": "#c1440e", "gloo": "#3b6ea5", "mpi": "#5a8f3d", "floor": "#888888"}
DPI = 110


def sizes(found: dict, path: Path) -> None:
    """Latency and bus bandwidth of allreduce over the size of the tensor, for every peer and the floor."""
    cases = [case for case in CASES if case.group in ("latency", "sizes")]
    figure, (latency, bandwidth) = plt.subplots(1, 2, figsize=(12, 4.6))
    share = 2 * (found["ranks"] - 1) / found["ranks"]
    for who, label in LABELS.items():
        points = [
            (case.nbytes, seconds)
            for case in cases
            if (seconds := found["seconds"].get(case.name, {}).get(who))
        ]
        if not points:
            continue
        across = [nbytes for nbytes, _ in points]
        middles = [median(seconds) for _, seconds in points]
        style: dict[str, Any] = {"color": COLOURS[who], "label": label, "marker": "o", "ms": 4}
        style["ls"] = "--" if who == "floor" else "-"
        latency.plot(across, [m * 1e6 for m in middles], **style)
        latency.fill_between(
            across,
            [min(seconds) * 1e6 for _, seconds in points],
            [m * 1e6 for m in middles],
            color=COLOURS[who],
            alpha=0.12,
        )
        speeds = [nbytes * share / m / 1e9 for nbytes, m in zip(across, middles, strict=True)]
        bandwidth.plot(across, speeds, **style)
    for axes, what in (
        (latency, "time, µs (down to the minimum)"),
        (bandwidth, "bus bandwidth, GB/s"),
    ):
        axes.set(xscale="log", yscale="log", xlabel="size of the tensor", ylabel=what)
        ticks = [case.nbytes for case in cases][::2]
        axes.set_xticks(ticks, [byte_text(tick) for tick in ticks], rotation=30)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(f"allreduce of one float32 tensor, {found['ranks']} ranks on one host, medians")
    _save(figure, path)


def overlap(models: list[dict], path: Path) -> None:
    """Step time of each variant: computing in step, and what communication adds to it."""
    figure, all_axes = plt.subplots(1, len(models), figsize=(6 * len(models), 3.2), squeeze=False)
    for axes, found in zip(all_axes[0], models, strict=True):
        bars = [
            (OVERLAP_LABELS[variant], peer, median(variants["lockstep"]), median(seconds))
            for peer, variants in found["steps"].items()
            for variant, seconds in variants.items()
            if variant not in ("compute", "lockstep")
        ]
        for label, peer, base, total in reversed(bars):
            axes.barh(label, min(base, total) * 1e3, color="#cccccc")
            axes.barh(label, max(total - base, 0) * 1e3, left=base * 1e3, color=COLOURS[peer])
            alone = base + median(found["alone"][peer])
            axes.plot([alone * 1e3] * 2, [label, label], marker="|", ms=26, color="black")
        axes.set(xlabel="step, ms", title=f"{found['model']}, {found['ranks']} ranks")
    figure.suptitle(
        "grey: computing in step; colour: added by communication; mark: if nothing overlapped"
    )
    _save(figure, path)


SCALING = {
    "root_messages_in": "messages to rank 0",
    "root_bytes_in": "bytes to rank 0",
    "root_cpu_us": "processor time of rank 0, µs",
    "modelled_step_us": "step with modelled links, µs",
}


def scaling(points: list[dict], path: Path) -> None:
    """Cost of a step's negotiation over the number of ranks, one line for each way of agreeing."""
    figure, all_axes = plt.subplots(1, len(SCALING), figsize=(4 * len(SCALING), 3.6))
    for axes, (quantity, label) in zip(all_axes, SCALING.items(), strict=True):
        for variant in dict.fromkeys(point["variant"] for point in points):
            mine = [point for point in points if point["variant"] == variant]
            ranks = [point["ranks"] for point in mine]
            axes.plot(ranks, [point[quantity] for point in mine], marker="o", ms=3, label=variant)
        axes.set(xscale="log", yscale="log", xlabel="ranks", title=label)
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
    all_axes[0].legend(fontsize="small")
    figure.suptitle("negotiating one step of 200 gradients in steady state, simulated")
    _save(figure, path)


NETS = ("#5a8f3d", "#3b6ea5", "#c1440e", "#8a5fb0")


def published(
    curves: dict[str, dict[str, list[float]]],
    accelerators: Sequence[int],
    known: dict[str, float | None],
    training: dict | None,
    path: Path,
) -> None:
    """Efficiency over the number of accelerators, modelled and published; beside it what ran here, if anything did."""
    count = 2 if training else 1
    figure, ((model, *rest),) = plt.subplots(1, count, figsize=(6 * count, 4.6), squeeze=False)
    for colour, (name, values) in zip(NETS, curves.items(), strict=True):
        label = f"{name}, modelled"
        model.plot(accelerators, values["line"], color=colour, marker="o", ms=4, label=label)
        model.plot(accelerators, values["here"], color=colour, ls=":")
    # Two published figures are equal: one marker for both.
    groups: dict[float, list[str]] = {}
    for name, share in known.items():
        if share is not None:
            groups.setdefault(share, []).append(name)
    for marker, (share, names) in zip("sD", groups.items(), strict=True):
        label = f"{' and '.join(names)}, published"
        model.plot([accelerators[-1]], [share], marker, mfc="none", mec="black", ms=9, label=label)
    model.set(xlabel="accelerators, four to a server", ylabel="efficiency", ylim=(0, 1.05))
    model.set_xscale("log", base=2)
    model.set_xticks(accelerators, list(map(str, accelerators)))
    model.set_title("MODELLED, 25 Gbit/s; dotted: at the rate reached here", fontsize="medium")
    for here in rest:
        _measured(here, training, dict(zip(curves, NETS, strict=True)))
    for axes in (model, *rest):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="x-small", loc="lower left")
    _save(figure, path)


def _measured(here: Any, training: dict, colours: dict[str, str]) -> None:
    """Efficiency of runs on this machine over the number of ranks."""
    markers = dict(zip(("PyTorch", "TensorFlow", "JAX"), "os^", strict=True))
    for run in training["runs"]:
        for hosts, line in ((1, "-"), (2, "--")):
            rows = [r for r in run["rows"] if r["hosts"] == hosts or r["ranks"] == 1]
            if len(rows) < 2:
                continue
            shares = [r["together"] / r["apart"] for r in rows]
            label = f"{run['framework']}, {run['model']}" if hosts == 1 else None
            style: dict[str, Any] = {"color": colours[run["model"]], "ls": line, "label": label}
            here.plot([r["ranks"] for r in rows], shares, marker=markers[run["framework"]], **style)
    here.set_xticks(range(1, 5))
    here.set(xlabel="ranks; dashed: on two hosts", ylabel="efficiency")
    here.set_ylim(bottom=0)
    here.set_title("measured on this machine's processors", fontsize="medium")


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    # Nothing about version or time in the file: the same figures give the same bytes.
    figure.savefig(path, dpi=DPI, metadata={"Software": None})
    plt.close(figure)
    print(f"wrote {path}")
