"""Strangers on a running job's ports: with a wrong key, or sending garbage. The job does not notice."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import harness
import strangers

# Checks every result until the test says stop; memory is printed at the end.
WORK_UNTIL_STOPPED = """
import os, resource, sys
import numpy as np
import horovod.numpy as hvd

hvd.init()
rank, size = hvd.rank(), hvd.size()
expected = sum(range(1, size + 1))
stop, step = False, 0
while not stop:
    for name, elements in (("small", 3), ("large", 300_000)):
        result = hvd.allreduce(np.full(elements, float(rank + 1), np.float32), op=hvd.Sum, name=name)
        assert np.array_equal(result, np.full(elements, float(expected), np.float32)), result
    wanted = hvd.broadcast(np.array(int(os.path.exists(sys.argv[1]))), 0, name="stop")
    stop, step = bool(wanted), step + 1
    if step == 3:
        print(f"working {os.getpid()}", flush=True)
print(f"all right, peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MiB", flush=True)
"""


@pytest.fixture
def busy(script, jobs, tmp_path: Path):
    """A job of two ranks at work, and the file that ends it."""
    stop = tmp_path / "stop"
    job = jobs(harness.python(2, script(WORK_UNTIL_STOPPED), str(stop)))
    job.wait_for("working", count=2)
    return job, stop


def test_stranger_with_a_wrong_key_is_told_so_and_the_job_goes_on(busy, script, jobs) -> None:
    job, stop = busy
    env = _environment_of_a_rank(job)
    assert "HOROVOD_JOB_KEY" in env
    env["HOROVOD_JOB_KEY"] = "5a" * 32
    env["HOROVOD_GLOO_TIMEOUT_SECONDS"] = "10"
    join = script("import horovod.numpy as hvd\nhvd.init()\nprint('let in')\n")

    stranger = jobs(harness.Job([sys.executable, join], env=env))
    code = stranger.fail()

    assert code == 1
    assert "let in" not in stranger.stdout
    assert "Horovod initialization failed" in stranger.stderr
    assert "key" in stranger.stderr.split("Horovod initialization failed")[1], stranger.report()
    _finish(job, stop)


def test_garbage_on_every_listening_port_does_no_harm(busy, pytestconfig) -> None:
    job, stop = busy
    places = strangers.listening(job.members())
    assert any(place[0] != "unix" for place in places), f"no port found; sockets: {places}"
    budget = pytestconfig.getoption("--garbage-mb") * 1_000_000 // len(places)

    sent = {place: strangers.send_garbage(place, budget) for place in places}

    print({str(place): f"{count / 1e6:.1f} MB" for place, count in sent.items()})
    assert all(count > 0 for count in sent.values())
    _finish(job, stop)


def test_silent_connections_do_not_keep_the_job_from_ending(busy) -> None:
    job, stop = busy
    silent = []
    for place in strangers.listening(job.members()):
        for _ in range(50):
            silent.append(strangers.connect(place))
    _finish(job, stop)
    for connection in silent:
        connection.close()


def _finish(job: harness.Job, stop: Path) -> None:
    stop.touch()
    job.succeed()
    lines = [line for line in job.stdout.splitlines() if "all right" in line]
    assert len(lines) == 2, job.report()
    print("\n".join(lines))


def _environment_of_a_rank(job: harness.Job) -> dict[str, str | None]:
    for pid in job.members():
        env = harness.environment_of(pid)
        if env.get("HOROVOD_RANK") == "1":
            return {name: value for name, value in env.items() if name.startswith("HOROVOD_")}
    raise AssertionError("rank 1 was not found")
