"""Programs of `horovod-burn` under `horovodrun`: they learn alike on any number of ranks, also when one is killed."""

from __future__ import annotations

from pathlib import Path

import pytest

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


def test_the_learner_of_burn_learns_the_same_on_one_two_and_three_ranks(programs, jobs) -> None:
    rust_examples.check_that_it_learns_alike(
        programs / "learner", jobs, loss_rel=1e-3, accuracy_abs=0.01
    )


def test_after_a_kill_the_training_goes_on_with_the_moments_of_the_last_commit(
    programs, jobs, tmp_path
) -> None:
    rust_examples.check_that_it_survives_a_kill(programs / "killed", jobs, tmp_path)
