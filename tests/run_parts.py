"""Runs what `tests/parts.toml` lists, part by part: `make test`, `make test-all` and `make ci`.

Every part runs, also after a failure. The table of seconds, started jobs and outcomes is printed at the end and written
to `.stamps/test-parts.txt`; each part's output is in `.stamps/test-logs`. The program needs only Python's own library,
because the first part makes `.venv`.
"""

from __future__ import annotations

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - a clone may be tried with any
    sys.exit(
        f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}: make PYTHON=python3.11"
    )

import argparse
import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import landings

ROOT = Path(__file__).resolve().parent.parent
PARTS = ROOT / "tests" / "parts.toml"
STAMPS = ROOT / ".stamps"
# Only a part that hangs reaches these: the limit of a part, and the limit of its processes to end after SIGINT.
LIMIT_S = 4 * 3600.0
# After SIGINT each test may wait twice as long as harness.REAP_LIMIT_S for the processes of its jobs.
STOP_LIMIT_S = 180.0
# Set by SIGINT, SIGTERM and SIGHUP.
stopped = threading.Event()

# The outcome of a part that was due too late.
LEFT_OUT = "LEFT OUT (the machine is too slow)"

COUNTED = ("passed", "failed", "skipped")
# The last line of a pytest that is not quiet, of nextest, and of each program of `cargo test`.
PYTEST = re.compile(r"=+ (?P<counts>(?:\d+ [a-z]+(?:, )?)+) in [\d.]+s.*=+$")
NEXTEST = re.compile(r"\s*Summary \[.*\]\s+\S+ tests? run: (?P<counts>.*)")
LIBTEST = re.compile(r"test result: \w+\. (?P<counts>.*)")
COUNT = re.compile(r"(\d+) (passed|failed|skipped|errors?|xfailed|xpassed|timed out|ignored)")
CALLED = {
    **dict.fromkeys(["error", "errors", "timed out"], "failed"),
    **dict.fromkeys(["xfailed", "xpassed"], "passed"),
    "ignored": "skipped",
}
NEXTEST_TIME = re.compile(r"\s+(?:PASS|FAIL|LEAK|TIMEOUT|SLOW) \[\s*([\d.]+)s\] (?:\(.*\) )?(.*)")
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class Part:
    """A name, a shell command, and its outcome."""

    name: str
    command: str
    outcome: str = "not run"
    seconds: float = 0.0
    jobs: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    begins_within_s: float | None = None
    """Left out if the run has lasted longer when this part is due."""

    def has_failed(self) -> bool:
        """Whether it ran and failed, or was due and did not run."""
        return self.outcome not in ("passed", LEFT_OUT)

    def is_late(self, elapsed_s: float) -> bool:
        """Whether the part is left out, as the run has lasted this long."""
        return self.begins_within_s is not None and elapsed_s > self.begins_within_s


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    kinds = parser.add_subparsers(dest="kind", required=True)
    first = kinds.add_parser("first", help="the first tier, what `make test` runs")
    first.add_argument("--only", nargs="+", metavar="NAME", help="parts whose names begin so")
    second = kinds.add_parser("second", help="the second tier, what `make test-all` runs")
    second.add_argument("--shard", default="", metavar="K/N", help="one shard of it; else all")
    kinds.add_parser("ci", help="lint, the first tier, the wheel check, and a shard of the second")
    slowest = kinds.add_parser("slowest", help="the slowest tests of the last run")
    slowest.add_argument("count", nargs="?", type=int, default=20)
    args = parser.parse_args()
    table = tomllib.loads(PARTS.read_text())
    if args.kind != "slowest" and "writes_gb" in table:
        refuse_a_full_disk(table["writes_gb"])
    # No `match`: an old Python would refuse the file before it can print which one is needed.
    if args.kind == "first":
        return run(only(first_tier(table), args.only))
    if args.kind == "second":
        shards = shards_of(args.shard, landings.SHARDS)
        return run([first_tier(table)[0], *second_tier(table, shards)])
    if args.kind == "ci":
        return run(in_ci(table))
    logs = STAMPS / "test-logs"
    print("\n".join([*slowest_tests(logs, args.count), "", *costliest_files(logs, args.count)]))
    return 0


def first_tier(table: dict[str, Any]) -> list[Part]:
    """The parts that every change has to pass."""
    return [Part(row["name"], row["command"]) for row in table["first"]]


def second_tier(table: dict[str, Any], shards: Iterable[int]) -> list[Part]:
    """The parts of some shards: those that name it, and those of which every shard has its share."""
    count = landings.SHARDS
    found = []
    for shard in shards:
        for row in table["second"]:
            if row.get("shard", shard) == shard:
                name = row["name"] if "shard" in row else f"{row['name']} {shard}/{count}"
                command = row["command"].replace("{shard}", f"{shard}/{count}")
                found.append(Part(name, command))
    return found


def in_ci(table: dict[str, Any]) -> list[Part]:
    """The parts that CI runs for this commit. Prints the shard, and when each other one was due."""
    chosen = landings.choose(ROOT)
    print("\n".join(chosen.lines()), flush=True)
    second = second_tier(table, [chosen.shard])
    for part in second:
        part.begins_within_s = table["ci_shard_begins_within_s"]
    rows = {row["name"]: Part(row["name"], row["command"]) for row in table["ci"]}
    loom = next(Part(r["name"], r["command"]) for r in table["second"] if r["name"] == "loom")
    is_due, why = landings.loom_is_due(ROOT)
    print(f"loom: {why}", flush=True)
    extra = [loom] if is_due and loom.name not in {part.name for part in second} else []
    # A part that the shard has as well runs once.
    own = [p for p in rows.values() if p.name not in {part.name for part in second}]
    install, *others = first_tier(table)
    return [install, *own[:1], *others, *own[1:], *extra, *second]


def only(parts: list[Part], beginnings: list[str] | None) -> list[Part]:
    """The parts whose names begin with one of these words."""
    if not beginnings:
        return parts
    found = [part for part in parts if part.name.startswith(tuple(beginnings))]
    for word in beginnings:
        if not any(part.name.startswith(word) for part in parts):
            names = ", ".join(part.name for part in parts)
            sys.exit(f"--only {word}: no part's name begins so; there are {names}")
    return found


def shards_of(text: str, count: int) -> list[int]:
    """The shards that K/N names, or all."""
    if not text:
        return list(range(1, count + 1))
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or int(found[2]) != count or not 1 <= int(found[1]) <= count:
        sys.exit(f"SHARD={text}: expected K/{count} with K from 1 to {count}, such as 3/{count}")
    return [int(found[1])]


def refuse_a_full_disk(writes_gb: dict[str, float]) -> None:
    """End the program if a disk has less space than a run writes: on a full disk tests fail with other texts."""
    kind = "installed" if (STAMPS / "install").exists() else "from_nothing"
    needed = {str(ROOT): writes_gb[kind], tempfile.gettempdir(): writes_gb["temporary"]}
    for folder, needed_gb in needed.items():
        free_gb = shutil.disk_usage(folder).free / 1e9
        if free_gb < needed_gb:
            sys.exit(
                f"the disk of {folder} has {free_gb:.1f} GB free, and this run writes up to {needed_gb:.0f} GB there: "
                "remove what fills it (other clones, their target and .venv)"
            )


def run(parts: list[Part]) -> int:
    """Run all, also after a failure; show the table."""
    logs = STAMPS / "test-logs"
    logs.mkdir(parents=True, exist_ok=True)
    for old in logs.iterdir():
        old.unlink()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # nohup ignores SIGHUP, and that stays.
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: stopped.set())
    begin = time.monotonic()
    for part in parts:
        if part.is_late(time.monotonic() - begin):
            part.outcome = LEFT_OUT
        elif not stopped.is_set():
            print(f"\n=== {part.name}: {part.command.strip()}", flush=True)
            _run_part(part, logs)
            write_table(parts)
    print("\n" + write_table(parts) + "\n\n" + closing_line(parts), flush=True)
    return 130 if stopped.is_set() else int(any(part.has_failed() for part in parts))


def write_table(parts: list[Part]) -> str:
    """The table, which goes into a file as well."""
    width = max(len(part.name) for part in parts)
    lines = [f"{'part':{width}}  seconds  jobs  outcome"]
    for part in parts:
        counts = ", ".join(
            f"{part.counts[word]:,} {word}" for word in COUNTED if word in part.counts
        )
        outcome = f"{part.outcome} ({counts})" if counts else part.outcome
        lines.append(f"{part.name:{width}}  {part.seconds:7.0f}  {part.jobs:4}  {outcome}")
    seconds, jobs = sum(part.seconds for part in parts), sum(part.jobs for part in parts)
    lines.append(f"{'all':{width}}  {seconds:7.0f}  {jobs:4}")
    text = "\n".join(lines)
    (STAMPS / "test-parts.txt").write_text(text + "\n")
    return text


def closing_line(parts: list[Part]) -> str:
    """All counts added up, and the parts that failed."""
    sums = {word: sum(part.counts.get(word, 0) for part in parts) for word in COUNTED}
    line = "tests: " + ", ".join(f"{count} {word}" for word, count in sums.items())
    failed = [part.name for part in parts if part.has_failed()]
    return f"{line}; failed parts: {', '.join(failed)}" if failed else line


def count_tests(lines: Iterable[str]) -> dict[str, int]:
    """The sums of the last lines of the test programs; empty if there are none."""
    found: dict[str, list[str]] = {"pytest": [], "nextest": [], "libtest": []}
    for line in lines:
        for name, pattern in (("pytest", PYTEST), ("nextest", NEXTEST), ("libtest", LIBTEST)):
            if match := pattern.match(line):
                found[name].append(match["counts"])
    # nextest prints the output of failed tests, which has such lines of libtest.
    if found["nextest"]:
        found["libtest"] = []
    sums: dict[str, int] = {}
    for counts in (*found["pytest"], *found["nextest"], *found["libtest"]):
        for number, word in COUNT.findall(counts):
            word = CALLED.get(word, word)
            sums[word] = sums.get(word, 0) + int(number)
    return sums


def slowest_tests(logs: Path, count: int) -> list[str]:
    """The slowest tests of the last run, from pytest's reports and nextest's lines."""
    times: dict[str, float] = {}
    for report in sorted(logs.glob("*.xml")):
        for case in ElementTree.parse(report).iter("testcase"):
            name = f"{case.get('classname', '').replace('.', '/')}::{case.get('name')}"
            times[name] = float(case.get("time", 0))
    for log in sorted(logs.glob("*.log")):
        for line in log.read_text(errors="replace").splitlines():
            if match := NEXTEST_TIME.match(COLOURS.sub("", line)):
                times[match[2]] = float(match[1])
    if not times:
        return [f"no times in {logs}: run make test first"]
    slow = sorted(times.items(), key=lambda item: -item[1])[:count]
    return [f"{seconds:8.1f} s  {name}" for name, seconds in slow]


def costliest_files(logs: Path, count: int) -> list[str]:
    """The Python files whose tests used most processor time in the last run, with the processes that ended.

    The files that run in ranks are listed as well: `tests/test_parallel[np3-torch/test_state]`.
    """
    used: dict[str, float] = {}
    in_ranks: dict[str, float] = {}
    for report in sorted(logs.glob("*.xml")):
        for case in ElementTree.parse(report).iter("testcase"):
            file = case.get("classname", "").replace(".", "/")
            for noted in case.iter("property"):
                if noted.get("name") == "processor_s":
                    used[file] = used.get(file, 0.0) + float(noted.get("value", 0))
                if noted.get("name") == "ranks_processor_s":
                    name = case.get("name", "").removeprefix("test_on_every_rank")
                    in_ranks[file + name] = float(noted.get("value", 0))
    costly = sorted([*used.items(), *in_ranks.items()], key=lambda item: -item[1])[:count]
    of_all = f"{sum(used.values()):8.1f} s of processors in all Python tests"
    return [of_all, *(f"{seconds:8.1f} s  {file}" for file, seconds in costly)]


# -- one part


def _run_part(part: Part, logs: Path) -> None:
    name = re.sub(r"[^a-z0-9]+", "-", part.name.lower())
    jobs = logs / f"{name}.jobs"
    env = {
        **os.environ,
        "PATH": f"{ROOT / '.venv' / 'bin'}:{os.environ.get('PATH', '')}",
        "HVD_TEST_JOBS": str(jobs),
    }
    # A part may run pytest more than once, each time with its own report.
    number = itertools.count(1)
    pytest = lambda _: f"python -m pytest --junitxml={logs}/{name}-{next(number)}.xml"  # noqa: E731
    command = re.sub(r"\bpytest:", pytest, part.command)
    lines: list[str] = []
    begin = time.monotonic()
    # A session of its own: a signal to its group reaches the shell and all programs that the shell starts.
    process = subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    reader = threading.Thread(
        target=_copy, args=(process.stdout, logs / f"{name}.log", lines), daemon=True
    )
    reader.start()
    part.outcome = _wait(process, begin + LIMIT_S)
    # A process that the part has left behind may hold its output open.
    reader.join(10.0)
    part.seconds = time.monotonic() - begin
    part.jobs = len(jobs.read_text().splitlines()) if jobs.exists() else 0
    part.counts = count_tests(list(lines))


def _wait(process: subprocess.Popen[bytes], deadline: float) -> str:
    """Wait for the end, a signal, or the limit; what became of the part."""
    while time.monotonic() < deadline:
        try:
            code = process.wait(0.5)
            return "passed" if code == 0 else f"FAILED (exit status {code})"
        except subprocess.TimeoutExpired:
            if stopped.is_set():
                _end(process)
                return "stopped"
    _end(process)
    return f"FAILED (no end within {LIMIT_S:.0f} s)"


def _copy(stream: Any, log: Path, lines: list[str]) -> None:
    with log.open("wb") as file:
        for line in stream:
            file.write(line)
            # After `make test | head`, or without a terminal, nobody reads this. If this thread ended, the part would
            # block on a full pipe.
            with contextlib.suppress(OSError):
                sys.stdout.buffer.write(line)
                sys.stdout.buffer.flush()
            lines.append(COLOURS.sub("", line.decode(errors="replace").rstrip("\n")))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Send SIGINT to all processes of a part, and SIGKILL to those that do not end."""
    for number in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
