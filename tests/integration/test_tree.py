"""Jobs that negotiate through a tree: results, who is named when a rank in it ends or is late, timelines.

The ranks use the core without a framework: four of them start in a second.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from pathlib import Path

import pytest

import harness

# With four ranks: 1 and 2 speak to 0, 3 speaks through 1.
TREE = {"HOROVOD_CONTROL_FAN_OUT": "2"}
INNER, LEAF = 1, 3

CORE = """
import os, sys, signal
from array import array
from horovod import _core
from horovod.common.exceptions import HorovodInternalError

def submit(name, values, process_set=0):
    data = array("f", values)
    address = data.buffer_info()[0]
    tensor = (address, address, 7, (len(data),), data)
    key = ("allreduce", name, process_set)
    return data, _core.enqueue(key, (_core.ALLREDUCE, 1, 1.0, 1.0, -1, None), [tensor])

def total(name, values, process_set=0):
    data, handle = submit(name, values, process_set)
    _core.wait(handle)
    return data.tolist()

_core.init()
rank, size = _core.rank(), _core.size()
print(f"rank {rank} is process {os.getpid()}", flush=True)
"""

WORK = (
    CORE
    + """
for step in range(30):
    waiting = [submit(f"grad.{i}", [rank + i + step] * 50) for i in range(20)]
    for i, (data, handle) in enumerate(waiting):
        _core.wait(handle)
        assert data[49] == sum(range(size)) + size * (i + step)
# A child of an inner rank comes and goes.
if rank == 1 and os.fork() == 0:
    assert not _core.is_initialized()
    os._exit(0)
pair = _core.add_process_set([0, size - 1])
if rank in (0, size - 1):
    assert total("pair", [1.0], pair) == [2.0]
_core.remove_process_set(pair)
try:
    total("grad.0", [1.0] * (3 if rank == size - 1 else 2))
    raise AssertionError("the shapes differ")
except HorovodInternalError as error:
    assert f"rank {size - 1}" in str(error), error
# A leaf and an inner rank run out of data.
if rank not in (1, size - 1):
    assert total("more", [1.0]) == [size - 2.0]
_core.join()
assert total("more", [1.0]) == [float(size)]
_core.barrier(0)
_core.shutdown()
print("all right", flush=True)
"""
)


@pytest.mark.parametrize(("size", "shm"), [(8, "1"), (4, "0")])
def test_everything_works_and_the_timeline_has_every_rank(
    size: int, shm: str, script, jobs, tmp_path: Path
) -> None:
    path = tmp_path / "timeline.json"
    env = TREE | {"HOROVOD_TIMELINE": str(path), "HOROVOD_SHM": shm}
    job = jobs(harness.python(size, script(WORK), env=env)).succeed()
    assert job.stdout.count("all right") == size
    # Of each rank all it did, of those whose messages pass through others, too.
    counts = {str(rank): 0 for rank in range(size)}
    events = json.loads(path.read_text())
    grads = {
        event["pid"]
        for event in events
        if event.get("name") == "process_name" and "grad." in event["args"].get("name", "")
    }
    assert len(grads) == 20
    for event in events:
        name = event.get("name", "")
        if event["ph"] == "X" and event["dur"] == 0 and name in counts and event["pid"] in grads:
            counts[name] += 1
    assert all(count >= 30 * 20 for count in counts.values()), counts
    assert not [event for event in events if event.get("name") == "EVENTS_DROPPED"]


REDUCE_FOR_EVER = (
    CORE
    + """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
try:
    step = 0
    while True:
        total("gradient", [1.0] * 1000)
        step += 1
        if step == 10:
            print("reducing", flush=True)
except HorovodInternalError as error:
    print(f"rank {rank} caught: {error}", flush=True)
    sys.exit(3)
"""
)


@pytest.mark.parametrize("victim", [INNER, LEAF, 0], ids=["inner", "leaf", "root"])
def test_a_killed_rank_is_named_everywhere(victim: int, script, jobs) -> None:
    job = jobs(harness.python(4, script(REDUCE_FOR_EVER), env=TREE))
    pids = _pids(job, 4)
    job.wait_for("reducing", count=4)
    os.kill(pids[victim], signal.SIGKILL)
    caught = job.wait_for(" caught: ", count=3)
    assert job.fail() == 128 + signal.SIGKILL
    for line in caught:
        cause = line.split(" caught: ")[1]
        assert re.search(rf"rank {victim} on \S+: .*signal 9", cause), line
        assert socket.gethostname() in cause or "localhost" in cause


STALL = (
    CORE
    + """
import time

def wait_for(path):
    while not os.path.exists(path):
        time.sleep(0.01)

for step in range(3):
    total("known", [1.0])
_core.barrier(0)
print("ready", flush=True)
wait_for(sys.argv[1])
if rank == 1:
    wait_for(sys.argv[2])
assert total("known", [1.0]) == [4.0]
_core.shutdown()
print("all right", flush=True)
"""
)
WARN_SOON = TREE | {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1"}


def test_only_the_late_rank_is_named_though_others_speak_through_it(
    script, jobs, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.touch()
    job = jobs(harness.python(4, script(STALL), str(first), str(second), env=WARN_SOON))
    # In the end its child has asked and is known to wait, however slow it was.
    for reports in range(2, 30):
        job.wait_for("1: [allreduce.known]", count=reports)
        whole = job.stderr.split("Missing ranks:")[reports - 1]
        if "3: [" not in whole:
            break
    else:
        pytest.fail(job.report())
    second.touch()
    job.succeed()
    assert job.stdout.count("all right") == 4


def test_a_report_says_whom_a_frozen_rank_hides(script, jobs, tmp_path: Path) -> None:
    path = tmp_path / "go"
    job = jobs(harness.python(4, script(STALL), str(path), str(path), env=WARN_SOON))
    pids = _pids(job, 4)
    job.wait_for("ready", count=4)
    os.kill(pids[INNER], signal.SIGSTOP)
    path.touch()
    job.wait_for("What rank 3 said comes through rank 1")
    os.kill(pids[INNER], signal.SIGCONT)
    job.succeed()
    assert job.stdout.count("all right") == 4


def test_an_impossible_fan_out_is_refused(script, jobs) -> None:
    job = jobs(harness.python(2, script(CORE), env={"HOROVOD_CONTROL_FAN_OUT": "1"}))
    job.fail()
    assert "HOROVOD_CONTROL_FAN_OUT=1: expected 2 to 65536" in job.stderr


def _pids(job: harness.Job, size: int) -> dict[int, int]:
    lines = job.wait_for(" is process ", count=size)
    found = [re.search(r"rank (\d+) is process (\d+)", line) for line in lines]
    return {int(match[1]): int(match[2]) for match in found}
