"""The harness itself: it must see what a job leaves behind, and show stacks when a job hangs."""

from __future__ import annotations

import sys

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
    job = jobs(harness.Job([sys.executable, path], limit_s=60))
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


@pytest.mark.parametrize(
    "leave",
    [
        "open('/dev/shm/hvd-harness-selftest', 'w').close()",
        "import os, socket\nsocket.socket(socket.AF_UNIX).bind(os.environ['TMPDIR'] + '/left.sock')",
    ],
    ids=["shared memory", "socket"],
)
def test_finds_a_file_left_behind(leave: str, script, jobs) -> None:
    job = jobs(harness.Job([sys.executable, script(leave)]))
    try:
        with pytest.raises(AssertionError, match="files left behind"):
            job.succeed()
    finally:
        (harness.SHM / "hvd-harness-selftest").unlink(missing_ok=True)


def test_reports_the_status_of_a_killed_program_as_a_shell_does(script, jobs) -> None:
    job = jobs(harness.Job([sys.executable, script("import os; os.kill(os.getpid(), 9)")]))
    assert job.fail() == 137


def test_waiting_for_a_line_fails_at_once_when_the_job_ends_without_it(script, jobs) -> None:
    job = jobs(harness.Job([sys.executable, script("print('something else')")]))
    with pytest.raises(AssertionError, match="ended with 0 of 1 lines"):
        job.wait_for("never printed")
