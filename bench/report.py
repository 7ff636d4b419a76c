"""The measured part of docs/performance.md, between two markers, and its pictures; the prose around it is by hand."""

from __future__ import annotations

from pathlib import Path

import frameworks
import metrics
import plots
import tables
from results import Results

BEGIN = "<!-- measured: begin; `make bench` writes what follows -->"
END = "<!-- measured: end -->"
RANKS = (2, 4)


def sections(results: Results, pictures: Path) -> list[str]:
    """Everything that was measured, as Markdown; pictures are written beside the page."""
    lines: list[str] = []
    for ranks in RANKS:
        found = results.load(f"collectives-{ranks}")
        if not found:
            continue
        picture = pictures / f"performance-sizes-{ranks}.png"
        plots.sizes(found, picture)
        lines += [f"### Collectives, {ranks} ranks on one host", "", found["machine"] + ".", ""]
        if barriers := found.get("meetings"):
            times = ", ".join(f"{1e9 * seconds:.0f}" for seconds in barriers)
            lines += [f"Two processes met in {times} ns before each round.", ""]
        lines += disturbances(found)
        lines += [*tables.collectives(found), "", f"![]({picture.name})", ""]
    if found := results.load("frameworks"):
        lines += ["### Frameworks, 2 ranks on one host", "", found["machine"] + ".", ""]
        lines += [*disturbances(found), *frameworks.rows(found), ""]
    if found := results.load("overlap"):
        picture = pictures / "performance-overlap.png"
        plots.overlap(found, picture)
        lines += ["### Training steps", ""]
        for model in found:
            lines += [*tables.overlap(model), ""]
        lines += [f"![]({picture.name})", ""]
    for part, title, table in (
        ("startup", "Start of a job", tables.startup),
        ("idle", "Idle", tables.idle),
        ("metrics", "Measuring a job", metrics.sections),
    ):
        if found := results.load(part):
            lines += [f"### {title}", "", *table(found), ""]
    if found := results.load("hosts"):
        lines += ["### Two hosts", "", *found, ""]
    if found := results.load("scaling"):
        picture = pictures / "performance-scaling.png"
        plots.scaling(found, picture)
        lines += ["### Number of ranks", ""]
        lines += ["Simulated; what is assumed says [scaling.md](scaling.md).", ""]
        lines += [f"![]({picture.name})", ""]
    return lines


def disturbances(found: dict) -> list[str]:
    """A warning above figures that other work has disturbed."""
    if not found.get("disturbed"):
        return []
    text = "; ".join(found["disturbed"])
    return [f"**Disturbed, worth little, to be measured again:** {text}.", ""]


def write(page: Path, lines: list[str], begin: str = BEGIN) -> None:
    """Replace the sections between the markers that were measured; those that were not stay."""
    text = page.read_text()
    if text.count(begin) != 1 or text.count(END) != 1 or text.index(begin) > text.index(END):
        raise SystemExit(f"{page}: needs one line {begin!r} and after it one {END!r}")
    before, rest = text.split(begin)
    measured, after = rest.split(END)
    found = _by_title(measured.splitlines()) | _by_title(lines)
    whole = "\n\n".join(found.values())
    page.write_text(before + begin + "\n\n" + whole + "\n\n" + END + after)
    print(f"wrote {page}")


def _by_title(lines: list[str]) -> dict[str, str]:
    """The text of each section, with its title; what stands before the first title has none."""
    untitled, *titled = ("\n" + "\n".join(lines)).split("\n### ")
    found = {section.partition("\n")[0]: "### " + section.strip() for section in titled}
    return {"": untitled.strip()} | found if untitled.strip() else found
