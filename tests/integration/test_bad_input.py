"""Mistakes on the command line: one clear message each, no traceback, no rank started, nothing left."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import harness

TRUE = [sys.executable, "-c", "print('a rank ran')"]


def refused(jobs, words: list[str]) -> tuple[int, str]:
    """Run horovodrun with these words; return its status and message."""
    job = jobs(harness.Job([harness.HOROVODRUN, *words]))
    code = job.fail()
    assert "Traceback" not in job.stderr, job.report()
    assert "a rank ran" not in job.stdout, job.report()
    return code, job.stderr


@pytest.mark.parametrize("count", ["0", "-1", "two", "1.5", "99999999999999999999"])
def test_number_of_processes_must_be_positive(count, jobs) -> None:
    code, text = refused(jobs, ["-np", count, *TRUE])
    assert code == 2
    assert "-np" in text
    assert count in text


def test_number_of_processes_is_required(jobs) -> None:
    code, text = refused(jobs, TRUE)
    assert code == 2
    assert "-np" in text


def test_a_command_is_required(jobs) -> None:
    assert "command" in refused(jobs, ["-np", "2"])[1]


def test_host_that_does_not_resolve_is_named(jobs) -> None:
    _, text = refused(jobs, ["-np", "2", "-H", "no-such-host.invalid:2", *TRUE])
    assert "no-such-host.invalid" in text


@pytest.mark.parametrize(
    ("hosts", "quoted"),
    [
        ("localhost:x", '"localhost:x"'),
        ("localhost:-1", '"localhost:-1"'),
        (":2", '":2"'),
        ("localhost:1,,", '""'),
        ("localhost:1,a b:2", '"a b:2"'),
    ],
)
def test_bad_item_of_a_host_list_is_quoted(hosts, quoted, jobs) -> None:
    assert quoted in refused(jobs, ["-np", "1", "-H", hosts, *TRUE])[1]


def test_more_processes_than_slots_says_both_numbers(jobs) -> None:
    for mode in ([], ["--doctor"]):
        code, text = refused(jobs, [*mode, "-np", "3", "-H", "localhost:2", *TRUE])
        assert code == 2
        assert "3" in text
        assert "2" in text
        assert "slots" in text


def test_bad_line_of_a_hostfile_is_named_with_file_and_number(jobs, tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("# a comment\nlocalhost slots=1\nlocalhost slots=many\n")
    _, text = refused(jobs, ["-np", "1", "--hostfile", str(hostfile), *TRUE])
    assert str(hostfile) in text
    assert "3" in text.replace(str(hostfile), "")
    assert "slots=many" in text or "many" in text


@pytest.mark.parametrize("option", ["--hostfile", "--config-file", "lsf"])
def test_a_file_without_an_end_is_not_read_to_it(option, jobs) -> None:
    endless = "/dev/zero"
    env = {"LSB_JOBID": "1", "LSB_DJOB_HOSTFILE": endless} if option == "lsf" else {}
    # With a number of processes, an allocation that cannot be read is a note.
    words = [] if option == "lsf" else ["-np", "1", option, endless]
    # A hundredth of what it took before.
    limited = [
        sys.executable,
        "-c",
        "import os, resource, sys; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30)); "
        "os.execv(sys.argv[1], sys.argv[1:])",
    ]
    job = jobs(harness.Job([*limited, harness.HOROVODRUN, *words, *TRUE], env=env))
    assert job.fail() in (1, 2)
    assert "longer than 4194304 bytes" in job.stderr
    assert "/dev/zero" in job.stderr


def test_missing_file_is_named(jobs, tmp_path: Path) -> None:
    for option in ("--hostfile", "--ssh-identity-file"):
        code, text = refused(jobs, ["-np", "1", option, str(tmp_path / "absent"), *TRUE])
        assert code == 2
        assert str(tmp_path / "absent") in text


def test_missing_script_fails_with_pythons_message_and_status(jobs, tmp_path: Path) -> None:
    job = jobs(harness.python(2, tmp_path / "absent.py"))
    assert job.fail() == 2
    assert "absent.py" in job.stderr
    assert "No such file" in job.stderr


def test_missing_program_is_named(jobs) -> None:
    job = jobs(harness.horovodrun(2, ["no-such-program-here"]))
    assert job.fail() == 127
    assert "no-such-program-here" in job.stderr


def test_an_error_is_one_line_without_the_usage(jobs) -> None:
    for words in (
        ["-np", "none", *TRUE],
        ["--no-such-option", *TRUE],
        ["-np", "1", "-H", "a", *TRUE],
    ):
        _, text = refused(jobs, words)
        assert text.startswith("horovodrun: error: ")
        assert len(text.splitlines()) == 1
        assert "usage:" not in text


def test_localhost_alone_has_the_cores_of_this_machine(jobs) -> None:
    jobs(harness.horovodrun(1, TRUE, "-H", "localhost")).succeed()
    too_many = str(len(os.sched_getaffinity(0)) + 1)
    _, text = refused(jobs, ["-np", too_many, "-H", "localhost", *TRUE])
    assert f"Requested more processes ({too_many}) than there are available slots" in text


def test_unknown_option_is_refused(jobs) -> None:
    code, text = refused(jobs, ["-np", "1", "--no-such-option", *TRUE])
    assert code == 2
    assert "--no-such-option" in text
