"""Draws the last step of a timeline: what each rank's threads did, and the lives of some tensors.

    python examples/timeline/draw.py timeline.json timeline.png

No substitute for https://ui.perfetto.dev, but a picture that fits into a report; and an example of how to read the
file. A step is what lies between two long pauses in which nobody submits anything.
"""

import argparse
import itertools
import json
from collections import defaultdict
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

COLOURS = {
    "ALLREDUCE": "tab:blue",
    "BROADCAST": "tab:green",
    "ALLGATHER": "tab:olive",
    "WAIT": "lightgrey",
}
TENSORS_SHOWN = 8


def read(path: Path) -> tuple[list[dict], dict[int, str], dict[tuple[int, int], str]]:
    """All events, the names of processes and the names of threads."""
    events = json.loads(path.read_text())
    processes, threads = {}, {}
    for event in events:
        if event.get("name") == "process_name" and "name" in event["args"]:
            processes[event["pid"]] = event["args"]["name"]
        elif event.get("name") == "thread_name":
            threads[event["pid"], event["tid"]] = event["args"]["name"]
    return events, processes, threads


def last_step(events: list[dict]) -> tuple[float, float]:
    """Beginning and end, in microseconds, of the last group of submissions and of what followed from them."""
    submissions = sorted(e["ts"] for e in events if e.get("cat") == "submit")
    pairs = list(itertools.pairwise(submissions))
    long = max((later - earlier for earlier, later in pairs), default=0.0) / 2
    begin = max([submissions[0], *(later for earlier, later in pairs if later - earlier > long)])
    operations = [
        e["ts"] + e["dur"] for e in events if e.get("cat") == "operation" and e["ts"] >= begin
    ]
    return begin, max(operations, default=submissions[-1])


def lives(events: list[dict], pid: int, begin: float) -> list[tuple[str, float, float]]:
    """Name, beginning and end of what the track of a tensor shows on its outer level."""
    found, open_ = [], []
    for event in (e for e in events if e.get("pid") == pid and e["ph"] in "BE"):
        if event["ph"] == "B":
            open_.append(event)
        else:
            started = open_.pop()
            if not open_ and started["ts"] >= begin:
                found.append((started["name"], started["ts"], event["ts"]))
    return found


def main() -> None:
    """Read the file, write the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("timeline", type=Path)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    events, processes, threads = read(options.timeline)
    begin, end = last_step(events)
    ranks = sorted(pid for pid, name in processes.items() if name.startswith("rank "))
    submitted = {
        pid: {
            e["name"]: e["ts"]
            for e in events
            if e.get("cat") == "submit" and e["pid"] == pid and e["ts"] >= begin
        }
        for pid in ranks
    }
    first = sorted(submitted[ranks[0]], key=lambda name: submitted[ranks[0]][name])
    shown = first[:: max(1, len(first) // TENSORS_SHOWN)][:TENSORS_SHOWN]

    lanes: list[str] = []
    figure, axes = plt.subplots(figsize=(13, 6.5))

    def lane(label: str) -> int:
        if label not in lanes:
            lanes.append(label)
        return lanes.index(label)

    def box(y: int, name: str, since: float, until: float, colour: str) -> None:
        left, width = (since - begin) / 1e3, max(until - since, 1.0) / 1e3
        axes.barh(
            y,
            width,
            left=left,
            height=0.7,
            color=colour,
            edgecolor="black",
            linewidth=0.4,
            label=name,
        )

    for pid in ranks:
        tracks = defaultdict(list)
        for event in events:
            if (
                event.get("pid") == pid
                and event.get("ts", 0) >= begin
                and event.get("cat") in ("submit", "operation", "wait")
            ):
                tracks[event["tid"]].append(event)
        for tid in sorted(tracks, key=lambda t: min(e["ts"] for e in tracks[t])):
            y = lane(f"{processes[pid].split(' on ')[0]}: {threads.get((pid, tid), tid)}")
            for event in sorted(tracks[tid], key=lambda e: e["cat"] != "wait"):
                if event["cat"] == "submit":
                    axes.plot(
                        (event["ts"] - begin) / 1e3,
                        y - 0.42,
                        marker="v",
                        color="tab:red",
                        markersize=5,
                        label="gradient submitted",
                        linestyle="none",
                    )
                else:
                    box(
                        y,
                        event["name"],
                        event["ts"],
                        event["ts"] + event["dur"],
                        COLOURS.get(event["name"], "tab:purple"),
                    )
    for pid, name in processes.items():
        if name in shown:
            y = lane(name.removeprefix("allreduce."))
            for what, since, until in lives(events, pid, begin):
                box(
                    y,
                    what,
                    since,
                    until,
                    "moccasin" if what.startswith("NEGOTIATE") else "tab:cyan",
                )

    axes.set_yticks(range(len(lanes)), lanes, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds since the first gradient of the step was submitted")
    axes.set_xlim(-0.01 * (end - begin) / 1e3, 1.02 * (end - begin) / 1e3)
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    axes.legend(unique.values(), unique.keys(), loc="lower left", fontsize=8, framealpha=0.9)
    axes.set_title(
        "One step: allreduces run while backward still submits gradients of earlier layers",
        fontsize=11,
    )
    figure.tight_layout()
    figure.savefig(options.picture, dpi=110)


if __name__ == "__main__":
    main()
