"""Compares two builds of horovod: the cases of cases.py and training steps, starts of both in turns.

Usage: python bench/builds.py BEFORE.whl AFTER.whl [-np N] [--starts K] [--groups G ...] [--all] [--json FILE]

A row's ratio is the time with AFTER over the time with BEFORE: above 1, AFTER is slower. Each start of one build has a
neighbour of the other build, and the median of a row in both gives one ratio. The table shows the median of these
ratios and their quartiles. The last column is the noise: how far two starts of one build are apart, in the same run.
A row is marked where its ratio is beyond both 1.02 and its noise.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import zipfile
from pathlib import Path

import cases
import launch
import tables
from processes import unwind_on_sigterm

BUILDS = ("before", "after")
MODELS = ("transformer", "convnet")
LIMIT_S = 300
NOTABLE = 1.02

# Medians of one start, by row.
Start = dict[str, float]


def unpacked(wheel: Path, folder: Path) -> Path:
    """The wheel's files in a folder that can stand in PYTHONPATH; its launcher is in `bin`."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    programs = folder / "bin"
    programs.mkdir()
    for script in folder.glob("*.data/scripts/*"):
        (programs / script.name).symlink_to(script)
        script.chmod(0o755)
    if not (programs / "horovodrun").exists():
        raise SystemExit(
            f"{wheel} has no horovodrun: give the wheel of the distribution with files"
        )
    return folder


def start(build: Path, ranks: int, chosen: list[cases.Case]) -> Start:
    """One job for the collectives and one for each model."""
    options = {
        "launcher": build / "bin" / "horovodrun",
        "env": {"PYTHONPATH": str(build)},
        "limit_s": LIMIT_S,
    }
    found: Start = {}
    words = ["--peer", "horovod", "--repeats", "9", "--budget", "0.3", "--cases"]
    words += [case.name for case in chosen]
    if chosen:
        for record in launch.run("horovod", ranks, "collectives_rank.py", *words, **options):
            found[record["case"]] = statistics.median(record["seconds"])
    for model in MODELS:
        steps: dict[str, list[float]] = {}
        words = ["--peer", "horovod", "--model", model, "--blocks", "4"]
        for record in launch.run("horovod", ranks, "overlap_rank.py", *words, **options):
            if "variant" in record:
                steps.setdefault(record["variant"], []).extend(record["steps"])
        for variant, seconds in steps.items():
            found[f"step of {model}: {variant}"] = statistics.median(seconds)
    return found


def measure(builds: dict[str, Path], ranks: int, starts: int, chosen: list[cases.Case]) -> dict:
    """All starts by build. The order of the two changes from turn to turn."""
    found: dict[str, list[Start]] = {build: [] for build in BUILDS}
    for turn in range(starts):
        for build in BUILDS if turn % 2 == 0 else reversed(BUILDS):
            print(f"start {turn + 1} of {starts}: {build}", flush=True)
            found[build].append(start(builds[build], ranks, chosen))
    return found


def ratios(found: dict[str, list[Start]], row: str) -> list[float]:
    """After over before, turn by turn."""
    pairs = zip(found["before"], found["after"], strict=True)
    return [after[row] / before[row] for before, after in pairs]


def noise(found: dict[str, list[Start]], row: str) -> float:
    """The median distance of two consecutive starts of one build, as a factor."""
    apart = []
    for build in BUILDS:
        times = [one[row] for one in found[build]]
        apart += [max(a / b, b / a) for a, b in itertools.pairwise(times)]
    return statistics.median(apart)


def table(found: dict[str, list[Start]]) -> list[str]:
    """One line for each row that both builds have."""
    lines = [
        tables.row("row", "before, ms", "after, ms", "after / before", "quartiles", "noise"),
        tables.row(*["---"] * 6),
    ]
    starts = [one for build in BUILDS for one in found[build]]
    for name in (name for name in starts[0] if all(name in one for one in starts)):
        ours = ratios(found, name)
        low, middle, high = statistics.quantiles(ours, n=4, method="inclusive")
        strays = noise(found, name)
        mark = " ✗" if middle > max(NOTABLE, strays) else ""
        medians = [f"{statistics.median(s[name] for s in found[b]) * 1e3:.4g}" for b in BUILDS]
        lines.append(
            tables.row(
                name, *medians, f"{middle:.3f}{mark}", f"{low:.3f} to {high:.3f}", f"{strays:.3f}"
            )
        )
    return lines


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for build in BUILDS:
        parser.add_argument(build, type=Path, help="a wheel")
    parser.add_argument("-np", "--num-proc", type=int, default=2)
    parser.add_argument("--starts", type=int, default=5, help="of each build, at least 3")
    parser.add_argument(
        "--groups", nargs="*", help="groups of cases.py, all by default; none: only steps"
    )
    parser.add_argument(
        "--all", action="store_true", help="also the cases that a quick run leaves out"
    )
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args()
    if options.starts < 3:
        parser.error(f"--starts {options.starts}: quartiles and noise need at least 3")
    unwind_on_sigterm()
    chosen = [
        case
        for case in cases.CASES
        if (options.all or case.quick) and (options.groups is None or case.group in options.groups)
    ]
    with tempfile.TemporaryDirectory(prefix="builds-") as folder:
        builds = {
            build: unpacked(getattr(options, build), Path(folder) / build) for build in BUILDS
        }
        found = measure(builds, options.num_proc, options.starts, chosen)
    if options.json:
        options.json.write_text(json.dumps(found))
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
