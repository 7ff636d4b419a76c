"""After SIGTERM ranks have time to finish, and the launcher names a rank that does not end."""

from __future__ import annotations

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
