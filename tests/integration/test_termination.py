"""After SIGTERM ranks have time to finish, and the launcher names a rank that does not end."""

from __future__ import annotations

import os
import re
import signal
import sys

import pytest

import harness

SCRIPT = """
import os, signal, sys, threading
may_end = threading.Event()
def finish(*_):
    print("finishes", flush=True)
    if os.environ["HOROVOD_RANK"] == "{slow}":
        signal.pause()
    may_end.wait({seconds})
    print("checkpoint written", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, finish)
print("ready", flush=True)
while True:
    signal.pause()
"""


def test_ranks_have_more_than_five_seconds_after_sigterm(jobs, script) -> None:
    job = jobs(harness.horovodrun(2, [sys.executable, script(SCRIPT.format(slow="", seconds=7))]))
    job.wait_for("ready", count=2)
    job.process.send_signal(signal.SIGTERM)
    job.wait_for("checkpoint written", count=2)
    assert job.wait() == 143
    assert "killed" not in job.stderr, job.report()


@pytest.mark.parametrize("option", [("--terminate-timeout", "1"), ()])
def test_a_rank_that_does_not_end_is_named(jobs, script, option) -> None:
    env = {} if option else {"HOROVOD_TERMINATE_TIMEOUT": "1"}
    command = [sys.executable, script(SCRIPT.format(slow="1", seconds=0))]
    job = jobs(harness.horovodrun(2, command, *option, env=env))
    job.wait_for("ready", count=2)
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 143
    assert "rank 1 had not ended 1 s after SIGTERM and was killed" in job.stderr, job.report()
    assert "checkpoint written" in job.stdout


# Handles both signals, and then ends by SIGTERM or stays, as the rank's word says.
NOTED = """
import os, signal, sys
rank, path, words = os.environ["HOROVOD_RANK"], sys.argv[1], sys.argv[2:]
def told(number, _):
    os.write(1, f"rank {rank} got signal {number}\\n".encode())
    if number == signal.SIGTERM and words[int(rank)] == "meets":
        os.close(os.open(path, (os.O_WRONLY, os.O_RDONLY)[int(rank)]))
        os._exit(0)
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, told)
os.write(1, f"rank {rank} is process {os.getpid()}\\n".encode())
while True:
    signal.pause()
"""
# A signal ends dash while the program that it started goes on.
IN_A_SHELL = '"$0" "$@"; exit $?'


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_program_that_outlives_its_shell_is_named(number, jobs, script, tmp_path) -> None:
    command = ["sh", "-c", IN_A_SHELL, sys.executable, script(NOTED), tmp_path, "stays", "stays"]
    job = jobs(harness.horovodrun(2, command, "--terminate-timeout", "1"))
    lines = job.wait_for("is process", count=2)
    job.process.send_signal(number)
    assert job.wait() == 128 + number
    for rank, pid in re.findall(r"rank (\d) is process (\d+)", "".join(lines)):
        named = rf"process {pid} \(\S+\) of rank {rank}\b.* had not ended 1 s after SIGTERM and were killed"
        assert re.search(named, job.stderr), job.report()
        # Once at most, though the shell has ended meanwhile; it may be killed before it prints that.
        assert job.stdout.count(f"rank {rank} got signal {signal.SIGTERM}") <= 1, job.report()


def test_sigterm_reaches_a_program_whose_shell_sigint_has_ended(jobs, script, tmp_path) -> None:
    path = tmp_path / "both"
    os.mkfifo(path)
    shell = '[ "$HOROVOD_RANK" = 0 ] || exec "$0" "$@"; trap "exit 1" INT; "$0" "$@" & wait'
    command = ["sh", "-c", shell, sys.executable, script(NOTED), path, "meets", "meets"]
    job = jobs(harness.horovodrun(2, command))
    job.wait_for("is process", count=2)
    job.process.send_signal(signal.SIGINT)
    # Each rank ends when the other got SIGTERM, too.
    assert job.wait() == 130
    assert "killed" not in job.stderr, job.report()


def test_a_stopped_program_in_a_shell_is_not_waited_for(jobs, script, tmp_path) -> None:
    command = ["sh", "-c", IN_A_SHELL, sys.executable, script(NOTED), tmp_path, "stays"]
    job = jobs(harness.horovodrun(1, command, "--terminate-timeout", "3600"))
    (line,) = job.wait_for("is process")
    os.kill(int(line.split()[-1]), signal.SIGSTOP)
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 143


LEFT = """
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.environ["HOROVOD_RANK"] == "0":
    open(sys.argv[1]).read()
else:
    # Before the fork: rank 0 can begin to read although the launcher kills the child at once.
    written = open(sys.argv[1], "w")
    if not os.fork():
        signal.pause()
"""


def test_a_process_that_a_rank_of_an_elastic_job_left_is_killed_and_named(
    jobs, script, tmp_path
) -> None:
    path = tmp_path / "left"
    os.mkfifo(path)
    options = ("--min-np", "1", "--terminate-timeout", "1")
    # Rank 0 ends when the process that rank 1 has left is no more.
    job = jobs(harness.horovodrun(2, [sys.executable, script(LEFT), path], *options))
    job.succeed()
    killed = r"process \d+ \(\S+\) of rank 1 had not ended 1 s after SIGTERM and was killed"
    assert re.search(killed, job.stderr), job.report()


STAYS_AT_EXIT = """
import atexit, threading
# Exit handlers run in the opposite order, so this one runs after Horovod's.
atexit.register(threading.Event().wait)
import horovod.numpy as hvd
hvd.init()
if hvd.rank() == 1:
    raise LookupError("of rank 1")
# Also a rank that has left the job before.
hvd.shutdown()
"""


def test_a_script_that_is_over_is_named_while_its_process_does_not_end(jobs, script) -> None:
    job = jobs(harness.python(2, script(STAYS_AT_EXIT)))
    lines = job.wait_for("has not ended, and the job waits for it", count=2)
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 143
    for how in (
        r"rank 0 is over: it ended \d+ s ago",
        r"rank 1 is over: it ended with an exception",
    ):
        assert re.search(rf"the script of {how}", "".join(lines)), job.report()
