"""Programs of `horovod-burn` under `horovodrun`: they learn alike on any number of ranks, also when one is killed."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import harness
import rust_examples

# The same front end and engine; burn itself takes too long to build for the first tier.
pytestmark = pytest.mark.thorough(
    also="tests/integration/test_rust.py::test_after_a_kill_the_job_goes_on_from_the_last_commit"
)


@pytest.fixture(scope="module")
def programs() -> Path:
    """The folder of the built programs."""
    return rust_examples.build_apart("burn")


def test_the_network_learns_the_same_on_one_two_and_three_ranks(programs, jobs) -> None:
    rust_examples.check_that_it_learns_alike(
        programs / "mlp", jobs, loss_rel=1e-3, accuracy_abs=0.01
    )


def test_after_a_kill_the_training_goes_on_with_the_moments_of_the_last_commit(
    programs, jobs, tmp_path
) -> None:
    words = [programs / "killed"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200.0, check=True)
    [undisturbed] = weights_of(done.stdout)

    # Slots that fail often would rest for a minute.
    env = {"HOROVOD_ELASTIC_SLOT_FAILURES": "100"}
    options = ("--min-np", "1", "--host-discovery-script", "echo localhost:2")
    job = jobs(harness.horovodrun(2, [programs / "killed", tmp_path], *options, env=env))
    job.succeed()

    assert "was killed by signal 9" in job.stderr
    assert set(weights_of(job.stdout)) == {undisturbed}
    generations = re.findall(r"generation of (\d): rank \d from step (\d+)", job.stdout)
    assert generations[:2] == [("2", "0")] * 2
    # Step 4 is the last commit before the kill.
    assert {("2", "4"), ("1", "4")} & set(generations)


def weights_of(stdout: str) -> list[str]:
    return re.findall(r"rank \d ended with (\[.*\])", stdout)
