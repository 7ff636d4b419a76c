"""The summary of a measured job at its end, and the log's lines about what was chosen."""

from __future__ import annotations

import re

import pytest

import harness

SCRIPT = """
import sys
import numpy as np
import horovod.numpy as hvd

hvd.init()
for _ in range(3):
    hvd.allreduce(np.ones(8, np.float32), name="x")
    hvd.step()
"""

SUMMARY = re.compile(
    r"horovod: (\d+) ranks? on 1 host ran (\d+) (steps|collectives) in .*: \d+ % computing, \d+ % communicating, "
    r"\d+ % waiting for other ranks\..* (No restarts|1 restart)\. Peak memory \d.* of rank \d on "
)


def summaries(job: harness.Job) -> list[re.Match[str]]:
    assert "horovod: " not in job.stdout, job.report()
    return list(SUMMARY.finditer(job.stderr))


def test_rank_0_sums_the_job_up_on_standard_error(script, jobs) -> None:
    env = {"HOROVOD_SUMMARY": "always"}
    job = jobs(harness.python(2, script(SCRIPT), env=env)).succeed()
    [found] = summaries(job)
    assert found.groups() == ("2", "3", "steps", "No restarts"), job.report()


@pytest.mark.parametrize(
    ("env", "options"),
    [
        pytest.param({}, [], id="not measured"),
        pytest.param({"HOROVOD_SUMMARY": "always"}, ["--quiet"], id="quiet"),
    ],
)
def test_no_summary_where_nobody_wants_one(
    script, jobs, env: dict[str, str], options: list[str]
) -> None:
    job = jobs(harness.python(2, script(SCRIPT), env=env, options=options)).succeed()
    assert "horovod: " not in job.stderr + job.stdout, job.report()


def test_several_rounds_of_a_process_are_one_line(script, jobs) -> None:
    text = (
        SCRIPT + "hvd.shutdown()\nhvd.init()\nhvd.allreduce(np.ones(8, np.float32))\nhvd.step()\n"
    )
    job = jobs(harness.python(2, script(text), env={"HOROVOD_SUMMARY": "always"})).succeed()
    [found] = summaries(job)
    assert found.groups() == ("2", "4", "steps", "1 restart"), job.report()


def test_a_script_that_fails_ends_with_its_own_error(script, jobs) -> None:
    text = SCRIPT + "raise RuntimeError('the script is wrong')\n"
    job = jobs(harness.python(1, script(text), env={"HOROVOD_SUMMARY": "always"}))
    job.fail()
    assert not summaries(job), job.report()


def test_the_log_says_what_was_chosen_and_why(script, jobs) -> None:
    job = jobs(harness.python(2, script(SCRIPT), options=["--log-level", "DEBUG"])).succeed()
    log = job.stderr + job.stdout
    for line in (
        r"horovodrun: debug: the hosts are this one, because none are named",
        r"horovodrun: debug: the ranks meet at \S+ \(because all ranks are on this host\)",
        r"hosts: 2 ranks on 1, .* has 0 1",
        r"ranks 0, 1 share memory",
        r"allreduce: up to \d+ bytes DIRECT_ALLREDUCE, above STAGED_ALLREDUCE, because all ranks share memory "
        r"\(limits without pre-staging\)",
        r"cache: 1024 operations are known by a number",
        r"cache: \d+ operations were known, \d+ were described",
        r"tuner: off \(HOROVOD_AUTOTUNE is not 1\)",
    ):
        assert re.search(line, log), f"{line}\n{job.report()}"


def test_without_shared_memory_the_log_names_the_interface(script, jobs) -> None:
    env = {"HOROVOD_SHM": "0", "HOROVOD_LOG_LEVEL": "DEBUG"}
    job = jobs(harness.python(2, script(SCRIPT), env=env)).succeed()
    log = job.stderr + job.stdout
    for line in (
        r"other ranks connect to \S+: the loopback, because all ranks are on this host",
        r"data for ranks [01] goes out through \S+ \(\S+\), over \d+ connections to each",
        r"allreduce: .*EXCHANGE_ALLREDUCE.*, because no ranks share memory",
    ):
        assert re.search(line, log), f"{line}\n{job.report()}"
