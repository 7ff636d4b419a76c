"""Ranks that live but do not answer are given up within the time-out; those that answer are not, whatever they do.

Most ranks use the core without a framework, which starts in a second.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import uuid
from pathlib import Path

import pytest

import harness

SOON = {"HOROVOD_HEARTBEAT_TIMEOUT_SECONDS": "2"}

CORE = """
import ctypes, os, pathlib, signal, sys, threading
from array import array
from horovod import _core
from horovod.common.exceptions import HorovodInternalError

def submit(name, values):
    data = array("f", values)
    address = data.buffer_info()[0]
    tensor = (address, address, 7, (len(data),), data)
    key = ("allreduce", name, 0)
    return data, _core.enqueue(key, (_core.ALLREDUCE, 1, 1.0, 1.0, -1, None), [tensor])

def total(name, values):
    data, handle = submit(name, values)
    _core.wait(handle)
    return data

def say(text):
    print(f"rank {rank} {text}", flush=True)

_core.init()
rank, size = _core.rank(), _core.size()
say(f"is process {os.getpid()}")
"""


def pids_of(job: harness.Job, size: int) -> dict[int, int]:
    lines = job.wait_for(" is process ", count=size)
    found = [re.search(r"rank (\d+) is process (\d+)", line) for line in lines]
    return {int(match[1]): int(match[2]) for match in found}


FROZEN = (
    CORE
    + """
how, elements, folder = sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3])

def wait_for_file(name):
    while not (folder / name).exists():
        threading.Event().wait(0.02)

total("first", [1.0])
say("is ready")
try:
    if how == "negotiates" and rank == 1:
        wait_for_file("go")
    while True:
        total("x", [1.0] * elements)
except HorovodInternalError as error:
    say(f"caught: {error}")
wait_for_file("end")
sys.exit(3)
"""
)


@pytest.mark.parametrize(
    ("how", "elements", "size", "victim"),
    [("negotiates", 1, 4, 1), ("reduces", 1 << 20, 3, 0)],
    ids=["negotiating in a tree, in the middle of it", "in large allreduces, the coordinator"],
)
def test_a_frozen_rank_is_given_up_by_all_and_learns_of_it(
    how, elements, size, victim, script, jobs, tmp_path: Path
) -> None:
    env = {**SOON, "HOROVOD_CONTROL_FAN_OUT": "2" if size > 3 else None}
    job = jobs(harness.python(size, script(FROZEN), how, str(elements), str(tmp_path), env=env))
    pids = pids_of(job, size)
    job.wait_for("is ready", count=size)
    os.kill(pids[victim], signal.SIGSTOP)

    caught = job.wait_for("caught: ", count=size - 1)
    assert {re.search(r"rank (\d) caught", line)[1] for line in caught} == {
        str(rank) for rank in range(size) if rank != victim
    }
    for line in caught:
        assert f"rank {victim} on localhost: it did not answer for" in line
        assert "HOROVOD_HEARTBEAT_TIMEOUT_SECONDS" in line
    job.wait_for(f"rank {victim} on host localhost does not answer rank")

    # It goes on, and finds that the others have ended the job.
    (tmp_path / "go").touch()
    os.kill(pids[victim], signal.SIGCONT)
    caught = job.wait_for("caught: ", count=size)
    last = next(line for line in caught if f"rank {victim} caught" in line)
    assert "Horovod lost a member of the job" in last or "Horovod has been shut down" in last
    (tmp_path / "end").touch()
    assert job.fail() == 3


WORK = (
    CORE
    + """
total("first", [1.0])
if rank == 1:
    say("keeps the interpreter's lock")
    ctypes.PyDLL(None).usleep(3_500_000)
assert total("second", [1.0])[0] == size
say("computes")
threading.Event().wait(1000)
"""
)


def test_who_computes_for_long_is_not_given_up_and_who_freezes_meanwhile_is_named(
    script, jobs
) -> None:
    job = jobs(harness.python(3, script(WORK), env=SOON))
    pids = pids_of(job, 3)
    job.wait_for("computes", count=3)

    # Nobody asks for anything: the engines find it out, and the launcher tells the user.
    os.kill(pids[2], signal.SIGSTOP)
    job.wait_for("rank 2 on host localhost does not answer rank 0")
    job.process.send_signal(signal.SIGINT)
    assert job.fail() == 130


WITH_CHILDREN = (
    CORE
    + """
import subprocess
total("first", [1.0])
if rank == 1:
    # As a data loader's workers are made, and another program; they outlive it.
    if os.fork() == 0:
        signal.pause()
    subprocess.Popen(["sleep", "1000"])
    say("has children")
try:
    while True:
        total("x", [1.0])
except HorovodInternalError as error:
    say(f"caught: {error}")
"""
)


def test_the_end_of_a_rank_whose_children_live_on_is_noticed_without_a_launcher(
    script, jobs, tmp_path: Path
) -> None:
    """By its closed socket: a child that kept it open would hide the end for ever, there is no time-out here."""
    env = {
        "HOROVOD_HEARTBEAT_TIMEOUT_SECONDS": "0",
        "HOROVOD_RENDEZVOUS_DIR": str(tmp_path),
        "HOROVOD_JOB_KEY": uuid.uuid4().hex * 2,
        "HOROVOD_SIZE": "2",
    }
    both = [
        jobs(
            harness.Job(
                [sys.executable, script(WITH_CHILDREN)],
                env={**env, "HOROVOD_RANK": rank},
                own_shm=False,
            )
        )
        for rank in ("0", "1")
    ]
    both[1].wait_for("has children")
    victim = pids_of(both[1], 1)[1]
    os.kill(victim, signal.SIGKILL)
    [line] = both[0].wait_for("caught: ")
    assert re.search(r"rank 1 on \S+: its process ended", line)
    assert len(both[1].members()) == 2, "the children are gone"
    both[0].succeed()
    both[1].kill()


ELASTIC = """
import os, sys
import horovod.numpy as hvd
from horovod.common import elastic

hvd.init()

@elastic.run
def train(state):
    print(f"generation of {hvd.size()}: rank {hvd.rank()} is process {os.getpid()}", flush=True)
    while True:
        # One rank sees the file first; all must go on alike.
        seen = hvd.allreduce(float(os.path.exists(sys.argv[1])), op=hvd.Max)
        if seen:
            break
        state.step += 1
        state.commit()
    print(f"done with {hvd.size()}", flush=True)

train(elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=0))
"""


def test_a_frozen_worker_of_an_elastic_job_is_replaced(script, jobs, tmp_path: Path) -> None:
    end = tmp_path / "end"
    job = jobs(
        harness.python(
            2, script(ELASTIC), str(end), options=["--min-np", "2", "-H", "localhost:2"], env=SOON
        )
    )
    pids = pids_of(job, 2)
    os.kill(pids[1], signal.SIGSTOP)
    lines = job.wait_for("generation of 2: ", count=4)
    again = [int(re.search(r"process (\d+)", line)[1]) for line in lines[2:]]
    assert pids[0] in again
    assert pids[1] not in again
    assert not Path(f"/proc/{pids[1]}").exists(), "the stopped process is still there"
    end.touch()
    job.succeed()
    assert job.stdout.count("done with 2") == 2
    assert "does not answer rank 0" in job.stderr


BETWEEN_ROUNDS = """
import os, pathlib, sys, threading
from horovod import _core
from horovod.common import _objects, elastic
from horovod.common.basics import basics
from horovod.common.process_sets import global_process_set

folder = pathlib.Path(sys.argv[1])

def wait_for_file(name):
    while not (folder / name).exists():
        threading.Event().wait(0.02)

class State(elastic.ObjectState):
    def __init__(self):
        def send(obj, root_rank):
            return _objects.broadcast_object(obj, root_rank, "state", global_process_set)
        super().__init__(send, basics.rank, step=0)

    def restore(self):
        super().restore()
        # The round is lost, and with it all neighbours; the next one waits.
        if rank in (1, 2):
            print(f"rank {rank} takes its time", flush=True)
            wait_for_file(f"go {rank}")

def again():
    basics.shutdown()
    basics.begin_again()

def train(state):
    global rank
    rank = _core.rank()
    print(f"round of {_core.size()}: rank {rank} is process {os.getpid()}", flush=True)
    while True:
        state.step += 1
        state.commit()
        agreed = _objects.broadcast_object((folder / "end").exists(), 0, "end", global_process_set)
        if agreed:
            return

basics.init()
elastic.run_fn(train, again)(State())
"""


def test_who_is_stopped_between_two_rounds_is_replaced_and_who_is_slow_there_is_not(
    script, jobs, tmp_path: Path
) -> None:
    # As many users start their ranks: by a script of the shell, which is not stopped.
    words = ["sh", "-c", f'"{sys.executable}" "$0" "$1"; exit $?', script(BETWEEN_ROUNDS)]
    options = ["--min-np", "2", "-H", "localhost:4"]
    job = jobs(harness.horovodrun(4, [*words, str(tmp_path)], *options, env=SOON))
    job.wait_for("round of 4: ", count=4)
    pids = pids_of(job, 4)
    os.kill(pids[3], signal.SIGKILL)
    job.wait_for(" takes its time", count=2)
    os.kill(pids[1], signal.SIGSTOP)

    job.wait_for("rank 1 on host localhost is wanted in a new round and has been stopped")
    # By the signal, or with 137: the shell may see Python's end before its own.
    job.wait_for("; slot 1 gets another process")
    (tmp_path / "go 2").touch()
    # Two are new.
    lines = job.wait_for("round of 4: ", count=8)
    again = {int(re.search(r"process (\d+)", line)[1]) for line in lines[4:]}
    assert {pids[0], pids[2]} < again
    assert not Path(f"/proc/{pids[1]}").exists(), "the stopped process is still there"
    (tmp_path / "end").touch()
    job.succeed()
