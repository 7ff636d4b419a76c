"""`horovodrun --doctor` on this host. Across hosts: tests/hosts/test_doctor_hosts.py."""

from __future__ import annotations

import json
import select
import signal
import stat
import sys
from pathlib import Path

import harness


def examine(jobs, *words: object, **kwargs) -> harness.Job:
    # It promises to need at most 15 s; the rest is for a machine that is busy.
    command = [harness.HOROVODRUN, *map(str, words)]
    return jobs(harness.Job(command, **kwargs))


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def findings(job: harness.Job) -> list[str]:
    assert job.fail() == 1, job.report()
    return [one["what"] for one in json.loads(job.stdout)["findings"]]


def test_this_host_is_well(jobs) -> None:
    job = examine(jobs, "--doctor", "-np", 2, sys.executable, "-c", "pass").succeed()
    assert job.stdout.startswith("localhost (this host, 2 ranks"), job.report()
    assert "1 host, 2 ranks: nothing would stop a job" in job.stdout
    assert f"Python {sys.version.split()[0]}, PyTorch" in job.stdout


def test_four_hosts_meet_each_other_in_both_directions(jobs) -> None:
    names = ["localhost", "127.0.0.1", "127.0.0.2", "127.0.0.3"]
    hosts = ",".join(f"{name}:1" for name in names)
    chart = json.loads(examine(jobs, "--doctor=json", "-H", hosts).succeed().stdout)
    assert not chart["would_stop"]
    assert chart["not_measured"] == []
    routes = {(route["from"], route["to"]): route["bytes_per_second"] for route in chart["ways"]}
    assert set(routes) == {(a, b) for a in names for b in names if a != b}
    assert all(rate > 1e6 for rate in routes.values()), routes
    assert all(host["memory"]["free"] > 0 for host in chart["hosts"])


def test_hosts_from_a_file_and_from_a_script(jobs, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost slots=3\n")
    script = program(tmp_path / "discover", "echo localhost:5")
    for words, ranks in (
        (("--hostfile", tmp_path / "hosts"), 3),
        (("--host-discovery-script", script, "--min-np", 1, "--max-np", 4), 4),
    ):
        job = examine(jobs, "--doctor=json", *words).succeed()
        assert json.loads(job.stdout)["ranks"] == ranks
    job = examine(jobs, "--doctor", "--host-discovery-script", "echo nonsense nonsense")
    assert job.fail() == 1
    assert "the host discovery script (echo nonsense nonsense)" in job.stderr


def test_programs_that_are_missing_or_broken_are_named(jobs, tmp_path: Path) -> None:
    found = findings(examine(jobs, "--doctor=json", "-np", 1, "no-such-command"))
    assert "command not found: no-such-command" in found[0]

    broken = program(tmp_path / "python3", "echo it is broken >&2; exit 1")
    found = findings(examine(jobs, "--doctor=json", "-np", 1, broken, "-c", "pass"))
    assert f"Python does not answer: {broken}: it is broken" in found

    # Isolated from the environment that this package is installed in.
    bare = program(tmp_path / "python3-bare", f'exec {sys.executable} -I -S "$@"')
    found = findings(examine(jobs, "--doctor=json", "-np", 1, bare, "-c", "pass"))
    assert any("cannot import horovod: ModuleNotFoundError" in what for what in found), found


def test_nothing_is_left_of_a_program_that_hangs(jobs, tmp_path: Path) -> None:
    mark = tmp_path / "started"
    hangs = program(tmp_path / "python3", f"touch {mark}; exec sleep 1000")
    job = examine(jobs, "--doctor", "-np", 1, hangs, "-c", "pass")
    while not mark.exists():
        assert job.process.poll() is None, job.report()
        select.select([], [], [], 0.02)
    job.process.send_signal(signal.SIGINT)
    assert job.fail() == 130
