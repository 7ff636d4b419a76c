"""Benchmarks of this repository that are ended early leave nothing behind."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

import harness

BENCH = Path(__file__).resolve().parent.parent.parent / "bench"
PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from processes import started, unwind_on_sigterm
unwind_on_sigterm()
words = ["horovodrun", "-np", "2", sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
with started(words) as process:
    process.wait()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_benchmark_that_is_told_to_end_ends_its_ranks(number, jobs) -> None:
    job = jobs(harness.Job([sys.executable, "-c", PROGRAM, str(BENCH)]))
    job.wait_for("up", count=2)
    job.process.send_signal(number)
    assert job.fail() in (128 + number, -number)
    job.assert_nothing_left()
