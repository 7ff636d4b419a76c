"""Draws the pictures of the pages into docs/pictures: `python build_backend/docs_pictures.py`.

The chart of README.md shows figures of docs/performance.md; `make bench` draws it again. The others show how ranks are
counted, and which values each collective operation puts where.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures"
PERFORMANCE = ROOT / "docs" / "performance.md"

FONT = "font-family='system-ui, sans-serif'"
INK, FAINT = "#1f2328", "#59636e"
# One color for each rank, and for ours, a peer's and computing alone.
COLORS = ["#8ecae6", "#ffb703", "#95d5b2", "#e5989b"]
OURS, PEER, ALONE = "#1f6feb", "#9a6700", "#b1bac4"


class Drawing:
    """An SVG on a light ground, so that it reads the same on dark pages."""

    def __init__(self, width: int, height: int, description: str) -> None:
        self.parts = [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' "
            f"height='{height}' role='img' aria-label='{escape(description)}'>",
            f"<rect width='{width}' height='{height}' rx='8' fill='#ffffff'/>",
        ]

    def box(self, x: float, y: float, width: float, height: float, color: str) -> None:
        """A filled box."""
        self.parts.append(
            f"<rect x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}' rx='4' fill='{color}'/>"
        )

    def frame(self, x: float, y: float, width: float, height: float) -> None:
        """An empty box."""
        self.parts.append(
            f"<rect x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}' rx='6' fill='none' "
            f"stroke='{FAINT}'/>"
        )

    def text(
        self, x: float, y: float, text: str, size: int = 14, anchor: str = "start", color: str = INK
    ) -> None:
        """A line of text."""
        self.parts.append(
            f"<text x='{x:g}' y='{y:g}' {FONT} font-size='{size}' text-anchor='{anchor}' "
            f"fill='{color}'>{escape(text)}</text>"
        )

    def arrow(self, x: float, y: float, length: float) -> None:
        """An arrow to the right."""
        end = x + length
        self.parts.append(
            f"<path d='M{x:g} {y:g}H{end:g}m-7 -5l7 5l-7 5' fill='none' stroke='{INK}' stroke-width='1.5'/>"
        )

    def __str__(self) -> str:
        return "\n".join([*self.parts, "</svg>", ""])


def training_steps(page: str) -> dict[str, dict[str, float]]:
    """The medians of docs/performance.md: milliseconds of a step, by model and kind of step."""
    section = page.split("### Training steps\n")[1].split("\n### ")[0]
    rows = {
        "computing alone": r"\| horovod-rs \| computing alone \| (\S+)",
        "horovod-rs": r"\| horovod-rs \| DistributedOptimizer \| (\S+)",
        "PyTorch DDP with Gloo": r"\| Gloo \| DistributedDataParallel \| (\S+)",
    }
    models = re.split(r"^(\w+), 2 ranks: ([\d.]+ million parameters).*$", section, flags=re.M)[1:]
    found = {}
    for name, size, table in zip(models[::3], models[1::3], models[2::3], strict=True):
        values = {row: float(re.findall(pattern, table)[0]) for row, pattern in rows.items()}
        found[f"{name}, {size}"] = values
    return found


def chart(found: dict[str, dict[str, float]]) -> Drawing:
    """Bars of one training step, ours and DDP's."""
    height = 74 + 112 * len(found)
    drawing = Drawing(760, height, "One training step with horovod-rs and with PyTorch DDP")
    drawing.text(
        20, 30, "One training step on 2 ranks of one machine: milliseconds, less is better", 16
    )
    longest = max(value for model in found.values() for value in model.values())
    y = 56
    for model, values in found.items():
        drawing.text(20, y, model, 13, color=FAINT)
        for (row, value), color in zip(values.items(), (ALONE, OURS, PEER), strict=True):
            y += 26
            drawing.text(190, y, row, 13, "end")
            drawing.box(200, y - 14, 470 * value / longest, 18, color)
            drawing.text(208 + 470 * value / longest, y, f"{value:g}", 13)
        y += 34
    drawing.text(
        20,
        height - 12,
        "CPUs only; docs/performance.md has the machine and all figures",
        12,
        color=FAINT,
    )
    return drawing


def ranks() -> Drawing:
    """Rank, local rank and cross rank on four servers of four."""
    drawing = Drawing(760, 330, "Rank, local rank and cross rank of 16 processes on 4 servers")
    drawing.text(20, 30, "16 processes on 4 servers of 4: size 16, local size 4, cross size 4", 16)
    for server in range(4):
        x = 20 + 184 * server
        drawing.frame(x, 48, 168, 262)
        drawing.text(x + 84, 70, f"server {server}", 14, "middle", FAINT)
        for local in range(4):
            y = 82 + 56 * local
            drawing.box(x + 10, y, 148, 48, COLORS[server])
            drawing.text(x + 84, y + 20, f"rank {4 * server + local}", 15, "middle")
            drawing.text(x + 84, y + 38, f"local {local}, cross {server}", 12, "middle")
    return drawing


# Of each collective: what the ranks pass and what they get, rows of (text, color) by rank, and a sentence.
Cells = list[list[tuple[str, str]]]
_BY_RANK: Cells = [[(str(rank + 1), COLORS[rank])] for rank in range(4)]
_GRAY = "#d0d7de"
_PARTS: Cells = [[(f"{rank}{part}", COLORS[rank]) for part in "abcd"] for rank in range(4)]
COLLECTIVES: dict[str, tuple[str, Cells, Cells]] = {
    "allreduce": (
        "allreduce (Sum): each rank gets the sum of all",
        _BY_RANK,
        [[("10", _GRAY)]] * 4,
    ),
    "broadcast": (
        "broadcast (root_rank=0): each rank gets the root's value",
        _BY_RANK,
        [[("1", COLORS[0])]] * 4,
    ),
    "allgather": (
        "allgather: each rank gets the values of all, in the order of ranks",
        _BY_RANK,
        [[row[0] for row in _BY_RANK]] * 4,
    ),
    "reducescatter": (
        "reducescatter (Sum): each rank gets its part of the sum",
        [[(str(part + 1), COLORS[rank]) for part in range(4)] for rank in range(4)],
        [[(str(4 * (part + 1)), _GRAY)] for part in range(4)],
    ),
    "alltoall": (
        "alltoall: part i of each rank goes to rank i",
        _PARTS,
        [[_PARTS[sender][rank] for sender in range(4)] for rank in range(4)],
    ),
}


def collective(title: str, before: Cells, after: Cells) -> Drawing:
    """Values of four ranks before and after an operation."""
    drawing = Drawing(620, 236, title)
    drawing.text(20, 30, title, 16)
    for rank in range(4):
        y = 48 + 44 * rank
        drawing.text(20, y + 23, f"rank {rank}", 14, color=FAINT)
        for x, cells in ((84, before[rank]), (370, after[rank])):
            for at, (text, color) in enumerate(cells):
                drawing.box(x + 54 * at, y, 48, 34, color)
                drawing.text(x + 54 * at + 24, y + 23, text, 15, "middle")
        drawing.arrow(316, y + 17, 38)
    return drawing


def pictures() -> dict[str, str]:
    """All pictures by the names of their files."""
    found = {
        "training-step.svg": str(chart(training_steps(PERFORMANCE.read_text()))),
        "ranks.svg": str(ranks()),
    }
    for name, (title, before, after) in COLLECTIVES.items():
        found[f"{name}.svg"] = str(collective(title, before, after))
    return found


def main() -> int:
    """Write the pictures."""
    PICTURES.mkdir(exist_ok=True)
    for name, text in pictures().items():
        (PICTURES / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
