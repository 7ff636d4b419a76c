"""Programs in Rust under `horovodrun`: the examples learn alike on any number of ranks, and every ending is defined."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import harness
import rust_examples

# A build from nothing on a loaded machine.
BUILD_LIMIT_S = 1500.0


@pytest.fixture(scope="module")
def programs() -> Path:
    """The folder of the built examples."""
    # The whole workspace, as in the Rust tests: for one package cargo would build its dependencies with other features.
    words = ["cargo", "build", "--locked", "--quiet", "--workspace", "--examples"]
    words += ["--message-format", "json"]
    built = subprocess.run(
        words, cwd=harness.ROOT, capture_output=True, text=True, timeout=BUILD_LIMIT_S, check=False
    )
    assert built.returncode == 0, built.stderr
    [found] = {Path(path).parent for path in re.findall(r'"executable":"([^"]+)"', built.stdout)}
    return found


@pytest.mark.parametrize("example", ["linear_regression", "async_softmax"])
def test_an_example_learns_the_same_on_one_two_and_three_ranks(example, programs, jobs) -> None:
    rust_examples.check_that_it_learns_alike(
        programs / example, jobs, loss_rel=1e-4, accuracy_abs=0.005
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_leave_the_job_and_join_it_again(ranks, programs, jobs) -> None:
    job = jobs(harness.horovodrun(ranks, [programs / "endings", "well"]))

    job.succeed()
    for rank in range(ranks):
        assert job.stdout.count(f"rank {rank} is well") == 2


@pytest.mark.thorough(
    also="tests/integration/test_rust.py::test_ranks_leave_the_job_and_join_it_again"
)
def test_the_launcher_that_cargo_installs_needs_no_python(programs, jobs, tmp_path) -> None:
    # Unoptimised, as `programs`: the same dependencies.
    words = ["cargo", "install", "--locked", "--quiet", "--debug", "--root", tmp_path]
    words += ["--path", "crates/horovod-launch"]
    built = subprocess.run(
        words, cwd=harness.ROOT, capture_output=True, text=True, timeout=BUILD_LIMIT_S, check=False
    )
    assert built.returncode == 0, built.stderr
    launcher = tmp_path / "bin" / "horovodrun"
    job = jobs(
        harness.Job([launcher, "-np", "2", programs / "endings", "well"], env={"PATH": "/nothing"})
    )
    job.succeed()
    for rank in (0, 1):
        assert job.stdout.count(f"rank {rank} is well") == 2


@pytest.mark.parametrize(
    ("ending", "code", "blamed", "caught"),
    [
        ("panic", 101, "the data of step 7 are missing", "the program of rank 1 has failed"),
        (
            "panic in scope",
            101,
            "the data of step 8 are missing",
            "the program of rank 1 has failed",
        ),
        ("error", 1, "Error: there are no data at /data", "rank 1 has left the job"),
        ("exit", 7, "rank 1 on host", "Horovod lost a member of the job: rank 1"),
    ],
)
def test_the_rank_that_fails_is_blamed_and_the_others_get_an_error_that_names_it(
    ending, code, blamed, caught, programs, jobs
) -> None:
    job = jobs(harness.horovodrun(2, [programs / "endings", ending]))

    assert job.wait() == code, job.report()
    job.assert_nothing_left()
    [headline] = re.findall(r"horovodrun: (rank 1 on host .*)", job.stderr)
    assert f"exited with code {code}" in headline
    report = job.stderr[job.stderr.index(headline) :]
    assert blamed in report, job.report()
    [line] = [line for line in job.stdout.splitlines() if "rank 0 caught: " in line]
    assert caught in line


@pytest.mark.parametrize(
    ("ending", "caught"),
    [
        ("exit 0", "Horovod lost a member of the job: rank 1"),
        ("forget", "Horovod lost a member of the job: rank 1"),
        ("leave", "rank 1 has left the job while this rank still had operations to do"),
    ],
)
def test_a_rank_that_leaves_early_ends_the_others_with_an_error(
    ending, caught, programs, jobs
) -> None:
    job = jobs(harness.horovodrun(2, [programs / "endings", ending]))

    assert job.wait() == 1, job.report()
    job.assert_nothing_left()
    [line] = [line for line in job.stdout.splitlines() if "rank 0 caught: " in line]
    assert caught in line


# ---- elastic jobs

# Slots that fail often would rest for a minute.
PATIENT = {"HOROVOD_ELASTIC_SLOT_FAILURES": "100"}


class Training:
    """An elastic job of `tests/programs/elastic.rs`, whose hosts are in a file."""

    def __init__(self, program, jobs, folder, slots, wanted, *mishap):
        self.hosts = folder / "hosts"
        self.list(slots)
        options = ("--min-np", "1", "--host-discovery-script", f"cat {self.hosts}")
        command = [program, folder, str(wanted), *mishap]
        self.job = jobs(harness.horovodrun(slots, command, *options, env=PATIENT))

    def list(self, slots):
        """From now on the host has so many slots."""
        new = self.hosts.with_name("hosts.new")
        new.write_text(f"localhost:{slots}\n")
        new.rename(self.hosts)

    def generations(self):
        """Size and first step of each rank's generations."""
        found = re.findall(r"generation of (\d): rank \d from step (\d+)", self.job.stdout)
        return [(int(size), int(step)) for size, step in found]


@pytest.fixture
def training(programs, jobs, tmp_path):
    return lambda *args: Training(programs / "elastic", jobs, tmp_path, *args)


@pytest.fixture(scope="module")
def undisturbed(programs, tmp_path_factory) -> str:
    """The weights at the end of a training of one rank."""
    words = [programs / "elastic", tmp_path_factory.mktemp("alone"), "1"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200.0, check=True)
    [weights] = weights_of(done.stdout)
    return weights


def weights_of(stdout: str) -> list[str]:
    return re.findall(r"rank \d ended with (\[.*\])", stdout)


def test_after_a_kill_the_job_goes_on_from_the_last_commit(training, undisturbed) -> None:
    run = training(2, 2, "kill once")
    run.job.succeed()
    assert "was killed by signal 9" in run.job.stderr
    assert weights_of(run.job.stdout) == [undisturbed] * 2
    generations = run.generations()
    assert generations[:2] == [(2, 0)] * 2
    # Step 4 is the last commit before the kill. The survivor may have trained alone before its new peer came.
    assert (2, 4) in generations or (1, 4) in generations
    assert generations[-1][0] == 2


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_members_are_added_and_removed_and_nothing_goes_back(
    before, after, training, undisturbed
) -> None:
    run = training(before, after)
    for _rank in range(before):
        run.job.wait_for("waits")
    run.list(after)
    run.job.succeed()
    assert weights_of(run.job.stdout) == [undisturbed] * after
    assert run.generations() == [(before, 0)] * before + [(after, 10)] * after
    assert run.job.stdout.count("was removed") == max(before - after, 0)


def test_a_rank_that_is_lost_again_and_again_ends_the_job(training) -> None:
    run = training(2, 2, "kill always")
    assert run.job.wait() != 0
    run.job.assert_nothing_left()
    assert "Horovod lost a member of the job: rank 1" in run.job.stderr
    # At most three for each commit that the other rank makes alone.
    assert run.job.stderr.count("was killed by signal 9") <= 12
    assert weights_of(run.job.stdout) == []


def test_a_job_whose_members_cannot_change_trains_once(
    programs, jobs, tmp_path, undisturbed
) -> None:
    job = jobs(harness.horovodrun(2, [programs / "elastic", tmp_path, "2"]))
    job.succeed()
    assert weights_of(job.stdout) == [undisturbed] * 2
