"""Timelines of whole jobs: through the launcher, at the end of the job, and when things go wrong."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

import harness

TRAIN = """
import os, sys
import numpy as np
import horovod.numpy as hvd

hvd.init()
for step in range(int(sys.argv[1])):
    handles = [hvd.allreduce_async(np.ones(100, np.float32), name=f"grad.{i}", op=hvd.Sum) for i in range(20)]
    for handle in handles:
        assert hvd.synchronize(handle)[0].item() == hvd.size()
print(f"rank {hvd.rank()} is done", flush=True)
"""


def read(path: Path) -> list[dict]:
    return json.loads(path.read_text())


def ready_marks(events: list[dict]) -> dict[str, int]:
    """How often each rank was seen to become ready for a tensor."""
    counts: dict[str, int] = {}
    for event in events:
        # A stage may be over within the clock's tick, too; only ranks are named by numbers.
        if event["ph"] == "X" and event["dur"] == 0 and event["name"].isdigit():
            counts[event["name"]] = counts.get(event["name"], 0) + 1
    return counts


def tensors(events: list[dict]) -> set[str]:
    found = (
        [e["args"].get("name", "") for e in events if e["name"] == "process_name"] if events else []
    )
    return {name for name in found if "grad" in name}


def test_the_launchers_option_records_the_whole_job(script, jobs, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    options = ["--timeline-filename", str(path), "--timeline-mark-cycles"]
    jobs(harness.python(3, script(TRAIN), "30", options=options)).succeed()

    events = [{"name": "", **event} for event in read(path)]
    assert tensors(events) == {f"allreduce.grad.{i}" for i in range(20)}
    # Nothing is lost at the end, of no rank: every tensor of every step.
    assert ready_marks(events) == {str(rank): 30 * 20 for rank in range(3)}
    assert not [e for e in events if e["name"] == "EVENTS_DROPPED"]
    assert [e for e in events if e["name"] == "CYCLE_START"]
    ranks = {e["pid"] for e in events if e.get("cat") == "operation"}
    assert ranks == {1_000_000_000 + rank for rank in range(3)}


def test_a_job_over_tcp_records_all_ranks(script, jobs, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    env = {"HOROVOD_TIMELINE": str(path), "HOROVOD_SHM": "0"}
    jobs(harness.python(2, script(TRAIN), "10", env=env)).succeed()
    events = [{"name": "", **event} for event in read(path)]
    assert ready_marks(events) == {"0": 200, "1": 200}


def test_a_file_that_cannot_be_written_is_said_once_and_training_goes_on(script, jobs) -> None:
    path = "/dev/full"
    job = jobs(harness.python(2, script(TRAIN), "50", env={"HOROVOD_TIMELINE": path})).succeed()
    printed = [line for line in job.stderr.splitlines() if "timeline" in line.lower()]
    assert len(printed) == 1, job.report()
    assert path in printed[0]
    assert "Z: E " in printed[0]


def test_a_disk_that_fills_up_leaves_a_valid_file(script, jobs, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    # Only now: the memory that ranks share is a file, too.
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))"
    limited = TRAIN.replace("hvd.init()", f"hvd.init(); {limit}").replace("int(sys.argv[1])", "100")
    job = jobs(harness.python(2, script(limited), env={"HOROVOD_TIMELINE": str(path)})).succeed()
    printed = [line for line in job.stderr.splitlines() if "timeline" in line.lower()]
    assert len(printed) == 1, job.report()
    assert "training goes on" in printed[0]
    assert 100_000 < path.stat().st_size <= 200_000
    assert len(read(path)) > 500


@pytest.mark.parametrize("victim", [0, 1])
def test_the_file_is_valid_when_a_rank_is_killed(victim: int, script, jobs, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    endless = """
import os
import horovod.numpy as hvd
hvd.init()
print(f"rank {hvd.rank()} is process {os.getpid()}", flush=True)
""" + TRAIN.replace("int(sys.argv[1])", "10**9")
    job = jobs(harness.python(2, script(endless), env={"HOROVOD_TIMELINE": str(path)}))
    lines = job.wait_for("is process", count=2)
    pids = {line.split("rank ")[1].split()[0]: int(line.split()[-1]) for line in lines}
    while not (path.exists() and path.stat().st_size > 1_000_000):
        os.sched_yield()
    os.kill(pids[str(victim)], signal.SIGKILL)
    job.fail()
    assert len(read(path)) > 1000


def test_a_timeline_in_a_folder_that_does_not_exist_is_refused_at_the_start(jobs, tmp_path) -> None:
    file = tmp_path / "missing" / "t.json"
    started = tmp_path / "started"
    job = jobs(harness.horovodrun(2, ["touch", str(started)], "--timeline-filename", str(file)))
    assert job.fail() == 1
    assert f"the folder {file.parent} of the timeline" in job.stderr
    assert not started.exists()
