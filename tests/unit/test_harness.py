"""The harness itself: it must see what a job leaves behind, and show stacks when a job hangs."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import tempfile
import uuid
from pathlib import Path

import pytest

import harness


def test_shows_output_and_stacks_of_a_job_that_hangs(script, jobs) -> None:
    path = script(
        "import threading\n"
        "def stuck_here():\n"
        "    print('about to hang', flush=True)\n"
        "    threading.Event().wait()\n"
        "stuck_here()\n"
    )
    job = jobs(harness.Job([sys.executable, path]))
    job.wait_for("about to hang")

    with pytest.raises(AssertionError, match="time limit reached") as caught:
        job.wait(limit_s=0.2)

    assert "about to hang" in str(caught.value)
    assert "in stuck_here" in str(caught.value)
    assert job.members() == []


def test_finds_a_process_that_outlives_its_parent(script, jobs) -> None:
    path = script(
        "import subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-c', 'import threading; threading.Event().wait()'],\n"
        "    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,\n"
        "    start_new_session=True)\n"
    )
    job = jobs(harness.Job([sys.executable, path]))
    assert job.wait() == 0

    with pytest.raises(AssertionError, match="processes left behind"):
        job.wait_until_gone(limit_s=0.1)


def test_sees_a_process_that_is_just_executing_its_program(jobs) -> None:
    """It shows no environment meanwhile, and would be taken for one of somebody else."""
    again = 'i=$1; [ "$i" = 0 ] || exec sh -c "$0" "$0" $((i - 1)); echo ready; read -r line <"$TMPDIR/wait"'
    begin = 'mkfifo "$TMPDIR/wait"; echo begins; exec sh -c "$0" "$0" 1000'
    job = jobs(harness.Job(["sh", "-c", begin, again]))
    # mkfifo is a process of the job, too.
    job.wait_for("begins")
    polls = 0
    while "ready" not in job.stdout:
        assert job.members() == [job.process.pid], job.report()
        polls += 1
    assert polls > 0
    job.kill()


def test_a_failed_job_is_read_from_its_top(script, jobs) -> None:
    """The rank that failed first with what it printed, before what the others said of it, and all the rest after."""
    path = script(
        "import horovod.numpy as hvd\n"
        "hvd.init()\n"
        "print('some', 'thing', hvd.rank(), flush=True)\n"
        "hvd.barrier()\n"
        "if hvd.rank() == 1:\n"
        "    raise LookupError('in rank 1')\n"
        "hvd.barrier()\n"
    )
    job = jobs(harness.python(3, path))
    with pytest.raises(AssertionError) as caught:
        job.succeed()
    first, *rest = str(caught.value).split("\n--- ")
    title, *lines = rest[0].splitlines()
    assert first == "exit status 1"
    assert (
        title
        == "failed first: rank 1 on host localhost exited with code 1. Last lines of its stderr:"
    )
    assert "[1]<stdout>:some thing 1" in lines
    # A rank's standard output and error come through two pipes, in no order.
    errors = [line for line in lines if "<stderr>" in line]
    assert errors[-1] == "[1]<stderr>:LookupError: in rank 1"
    assert all("[1]<std" in line for line in lines)
    assert [part.split("\n")[0].split(":")[0] for part in rest[1:]] == [
        "command",
        "standard output",
        "standard error",
    ]
    assert "[0]<stdout>:some thing 0" in rest[2]


def test_a_program_without_ranks_is_reported_by_its_last_lines(script, jobs) -> None:
    job = jobs(harness.Job([sys.executable, script("for i in range(1000): print('line', i)")]))
    job.wait()
    top = job.report().split("\n--- ")[0].splitlines()
    assert "no rank is known to have failed first" in top[0]
    assert top[0].endswith(f"(its last {len(top) - 1} of 1000 lines)")
    assert top[-1] == "line 999"


def test_finds_shared_memory_left_behind(script, jobs) -> None:
    left = harness.SHM / f"left-{uuid.uuid4().hex}"
    job = jobs(harness.Job([sys.executable, script(f"open('{left}', 'w').close()")]))
    assert job.wait() == 0
    if not job.sees_shared_memory():
        left.unlink()
        pytest.skip("this system allows no mounts, so nobody can tell whose files are whose")
    with pytest.raises(AssertionError, match=f"files left behind: .*{left.name}"):
        job.assert_nothing_left()
    assert not left.exists()


@pytest.mark.parametrize("begin", ["nccl-", "cuda.shm."])
def test_what_nccl_and_cuda_leave_when_a_rank_is_killed_is_theirs(begin, script, jobs) -> None:
    left = harness.SHM / f"{begin}{uuid.uuid4().hex}"
    job = jobs(harness.Job([sys.executable, script(f"open('{left}', 'w').close()")]))
    if not job.sees_shared_memory():
        assert job.wait() == 0
        left.unlink()
        pytest.skip("this system allows no mounts, so nobody can tell whose files are whose")
    job.succeed()
    assert not left.exists()


def test_finds_a_socket_left_behind(script, jobs) -> None:
    bind = "socket.socket(socket.AF_UNIX).bind(os.environ['TMPDIR'] + '/left.sock')"
    job = jobs(harness.Job([sys.executable, script(f"import os, socket\n{bind}")]))
    with pytest.raises(AssertionError, match="files left behind"):
        job.succeed()


def test_what_others_leave_is_not_the_jobs(script, jobs) -> None:
    name = f"hvd-other-{uuid.uuid4().hex}"
    others = [harness.SHM / name, Path(tempfile.gettempdir()) / name]
    job = jobs(harness.Job([sys.executable, script("print('runs')")]))
    try:
        others[0].touch()
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(os.fspath(others[1]))
        job.succeed()
    finally:
        for path in others:
            path.unlink(missing_ok=True)


def test_a_program_starts_as_it_would_without_the_harness(jobs) -> None:
    """The program that mounts the job's `/dev/shm` leaves no trace: no other user, no signal that is ignored."""
    lines = "while read -r name value; do echo $name $value; done </proc/self/status"
    # Python ignores these two itself; others may be ignored in whoever runs the tests, as under nohup.
    pythons = 1 << (signal.SIGPIPE - 1) | 1 << (signal.SIGXFSZ - 1)
    ours = re.search(r"SigIgn:\s*(\w+)", Path("/proc/self/status").read_text())[1]
    job = jobs(harness.Job(["sh", "-c", lines])).succeed()
    seen = dict(line.partition(":")[::2] for line in job.stdout.splitlines())
    assert int(seen["SigIgn"], 16) == int(ours, 16) & ~pythons
    assert seen["Uid"].split() == [str(os.getuid())] * 4
    assert seen["Gid"].split() == [str(os.getgid())] * 4


def test_reports_the_status_of_a_killed_program_as_a_shell_does(script, jobs) -> None:
    job = jobs(harness.Job([sys.executable, script("import os; os.kill(os.getpid(), 9)")]))
    assert job.fail() == 137


def test_waiting_for_a_line_fails_at_once_when_the_job_ends_without_it(script, jobs) -> None:
    job = jobs(harness.Job([sys.executable, script("print('something else')")]))
    with pytest.raises(AssertionError, match="ended with 0 of 1 lines"):
        job.wait_for("never printed")
