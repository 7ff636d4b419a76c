"""Tables of Markdown from what was measured, with each goal and whether it is reached."""

from __future__ import annotations

from statistics import median

from cases import CASES, Target, targets_of

LABELS = {"horovod": "horovod-rs", "gloo": "Gloo", "mpi": "Open MPI", "floor": "floor"}
REACHED, MISSED = "✓", "✗"


def milliseconds(seconds: list[float] | None) -> str:
    """Median (minimum to maximum)."""
    if not seconds:
        return ""
    low, middle, high = (_short(s * 1e3) for s in (min(seconds), median(seconds), max(seconds)))
    return f"{middle} ({low} to {high})"


def verdict(ratio: float, targets: list[Target]) -> str:
    """A ratio and its targets, as `9.1 (≥ 8 ✓)`."""
    parts = []
    for target in targets:
        relation = "≥" if target.against in ("gloo", "mpi") else "≤"
        mark = REACHED if target.reached(ratio) else MISSED
        stretch = "stretch " if target.stretch else ""
        parts.append(f"{stretch}{relation} {target.limit:g} {mark}")
    return f"{_short(ratio)} ({', '.join(parts)})" if parts else _short(ratio)


def collectives(found: dict) -> list[str]:
    """One row for each case."""
    ranks = found["ranks"]
    lines = [
        row("case", *(f"{label}, ms" for label in LABELS.values()), "Gloo / ours",
            "Open MPI / ours", "ours / floor"),
        row(*["---"] * 8),
    ]  # fmt: skip
    for case in CASES:
        seconds = found["seconds"].get(case.name)
        if not seconds or "horovod" not in seconds:
            continue
        ours = median(seconds["horovod"])
        targets = targets_of(case, ranks)
        ours_cell = milliseconds(seconds["horovod"])
        for target in targets:
            if target.against == "seconds":
                mark = REACHED if target.reached(ours) else MISSED
                ours_cell += f", stretch ≤ {target.limit * 1e3:g} {mark}"
        cells = [
            case.name,
            ours_cell,
            *(milliseconds(seconds.get(who)) for who in list(LABELS)[1:]),
        ]
        for who in ("gloo", "mpi", "floor"):
            if not seconds.get(who):
                cells.append("")
                continue
            theirs = median(seconds[who])
            ratio = ours / theirs if who == "floor" else theirs / ours
            cells.append(verdict(ratio, [t for t in targets if t.against == who]))
        lines.append(row(*cells))
    lines += [f"\nNot measured: {LABELS[who]}: {why}." for who, why in found["skipped"].items()]
    return lines


OVERLAP_LABELS = {
    "compute": "computing alone",
    "lockstep": "computing, then a barrier",
    "horovod": "DistributedOptimizer",
    "after": "ours, all gradients after backward",
    "ddp": "DistributedDataParallel",
}


def overlap(found: dict) -> list[str]:
    """Step times, what sending the gradients adds to computing in step, and how much of it is hidden."""
    lines = [
        f"{found['model']}, {found['ranks']} ranks: {found['parameters'] / 1e6:.1f} million "
        f"parameters in {found['tensors']} tensors ({found['bytes'] / 2**20:.0f} MiB of gradients)",
        "",
        row(
            "ranks of",
            "step",
            "ms",
            "added by gradients, ms",
            "the same allreduces alone, ms",
            "hidden",
        ),
        row(*["---"] * 6),
    ]
    for peer, variants in found["steps"].items():
        base, alone = median(variants["lockstep"]), median(found["alone"][peer])
        for variant, seconds in variants.items():
            cells = [LABELS[peer], OVERLAP_LABELS[variant], milliseconds(seconds)]
            if variant in ("compute", "lockstep"):
                cells += [""] * 3
            else:
                added = median(seconds) - base
                hidden = f"{1 - added / alone:.0%}"
                cells += [f"{added * 1e3:+.1f}", milliseconds(found["alone"][peer]), hidden]
            lines.append(row(*cells))
    steps = found["steps"]
    ratio = median(steps["horovod"]["horovod"]) / median(steps["gloo"]["ddp"])
    mark = REACHED if ratio <= 1 else MISSED
    return [*lines, "", f"Step time of ours / DDP: {ratio:.2f} (≤ 1 {mark})."]


def startup(found: dict) -> list[str]:
    """Start of a job against the same imports side by side."""
    plain, job = (found["seconds"][key] for key in ("plain", "horovodrun"))
    more = median(job) - median(plain)
    mark = REACHED if more <= STARTUP_MORE_S else MISSED
    return [
        row("start of 2 processes that import PyTorch", "seconds: median (min to max)"),
        row("---", "---"),
        row("side by side, nothing initialised", _seconds(plain)),
        row("under horovodrun, initialised", _seconds(job)),
        "",
        f"More: {more:+.2f} s (≤ {STARTUP_MORE_S:g} {mark}).",
    ]


STARTUP_MORE_S = 0.5
IDLE_PERCENT = 0.5
KEPT_PERCENT = 99.0


def idle(found: dict) -> list[str]:
    """Cost of an initialised but idle runtime."""
    lines = [
        row("ranks", "processor time of an idle rank", "throughput that computing keeps"),
        row("---", "---", "---"),
    ]
    for one in found:
        burnt = 100 * max(one["idle"])
        kept = 100 * median(one["kept"])
        lines.append(
            row(
                str(one["ranks"]),
                f"{burnt:.2f} % (≤ {IDLE_PERCENT:g} {REACHED if burnt <= IDLE_PERCENT else MISSED})",
                f"{kept:.1f} % ({100 * min(one['kept']):.1f} to {100 * max(one['kept']):.1f}; "
                f"≥ {KEPT_PERCENT:g} {REACHED if kept >= KEPT_PERCENT else MISSED})",
            )
        )
    return lines


def row(*cells: str) -> str:
    """A line of a table."""
    return f"| {' | '.join(cells)} |"


def _seconds(values: list[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def _short(value: float) -> str:
    """Three significant digits."""
    if value >= 100:
        return f"{value:.0f}"
    digits = 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:.{digits}f}" if value >= 0.001 else f"{value:.2g}"
