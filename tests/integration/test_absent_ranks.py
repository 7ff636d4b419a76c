"""If the script of a rank ends without `hvd.init()`, the others fail at once with an error that names this rank."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import harness

SCRIPT = """
import os, sys, time
if os.environ["HOROVOD_RANK"] == "{absent}":
    print("nothing to do here")
    sys.exit()
{wait}
import horovod.numpy as hvd
try:
    hvd.init()
except Exception as error:
    print("told:", error)
    raise
"""


@pytest.mark.parametrize("absent", [0, 1])
def test_the_rank_that_skips_init_is_blamed_at_once(jobs, tmp_path: Path, absent: int) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(absent=absent, wait=""))
    # A rank that waits for the absent one reaches the job's limit first.
    env = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "3600"}
    job = jobs(harness.horovodrun(2, [sys.executable, script], env=env))
    assert job.fail() == 1
    blamed = f"rank {absent} on host localhost exited with code 0 without calling hvd.init()"
    assert f"horovodrun: {blamed}" in job.stderr, job.report()
    assert "nothing to do here" in job.stderr
    expected = f"rank {absent} on localhost exited with code 0 without calling hvd.init()"
    assert "told: " in job.stdout, job.report()
    assert f"the job could not be set up: {expected}" in job.stdout, job.report()


def test_ranks_that_all_end_without_init_are_no_failure(jobs, tmp_path: Path) -> None:
    job = jobs(harness.horovodrun(2, [sys.executable, "-c", "print(1)"]))
    job.succeed()


def test_a_script_from_the_standard_input_is_refused() -> None:
    command = [harness.HOROVODRUN, "-np", "2", sys.executable, "-"]
    done = subprocess.run(
        command, input="print(1)", capture_output=True, text=True, timeout=harness.LIMIT_S
    )
    assert done.returncode != 0
    assert "standard input, which only rank 0 gets: save the script in a file" in done.stderr
    command[2] = "1"
    done = subprocess.run(
        command, input="print(1)", capture_output=True, text=True, timeout=harness.LIMIT_S
    )
    assert done.returncode == 0
    assert "1" in done.stdout
