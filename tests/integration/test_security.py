"""The promises of docs/security.md, shown on real processes: to another user of the host, and to an eavesdropper."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import harness
import strangers

# The ranks work until told to stop; what they share is full of one byte that is found nowhere else.
WORK_UNTIL_STOPPED = """
import os, sys
import numpy as np
import horovod.numpy as hvd

hvd.init()
stop = False
step = 0
while not stop:
    hvd.allreduce(np.full(100_000, float(hvd.rank()), np.float32), op=hvd.Sum, name="work")
    stop = bool(hvd.broadcast(np.array(int(os.path.exists(sys.argv[1]))), 0, name="stop"))
    step += 1
    if step == 3:
        print("working", os.environ["HOROVOD_JOB_KEY"], flush=True)
"""

# Tries, as whoever runs it, everything by which a process shows its inside; prints what it could read.
PROGRAM = """
import json, os, sys

if user := int(sys.argv[1]):
    # Only now, because others may not be let into the folder of the interpreter.
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)

def read(path):
    with open(path, "rb") as file:
        return file.read(1 << 16)

def memory(pid):
    for line in open(f"/proc/{pid}/maps"):
        if "rw" in line.split()[1] and "[heap]" in line:
            with open(f"/proc/{pid}/mem", "rb") as file:
                file.seek(int(line.split("-")[0], 16))
                return file.read(64)
    raise OSError("no heap is shown")

def descriptors(pid):
    found = [os.readlink(f"/proc/{pid}/fd/{n}") for n in os.listdir(f"/proc/{pid}/fd")]
    return " ".join(found).encode()

def shared(pid):
    for n in os.listdir(f"/proc/{pid}/fd"):
        if "memfd:horovod" in os.readlink(f"/proc/{pid}/fd/{n}"):
            return read(f"/proc/{pid}/fd/{n}")
    for name in os.listdir(f"/proc/{pid}/map_files"):
        if "memfd:horovod" in os.readlink(f"/proc/{pid}/map_files/{name}"):
            return read(f"/proc/{pid}/map_files/{name}")
    raise OSError("no shared memory is shown")

tries = {
    "command line": lambda pid: read(f"/proc/{pid}/cmdline"),
    "environment": lambda pid: read(f"/proc/{pid}/environ"),
    "memory": memory,
    "descriptors": descriptors,
    "shared memory": shared,
}
got = {name: [] for name in tries}
for pid in sys.argv[2:]:
    for name, attempt in tries.items():
        try:
            got[name].append(attempt(pid).decode("latin-1"))
        except OSError:
            pass
print(json.dumps(got))
"""

NOBODY = 65534


@pytest.fixture
def job(script, jobs, tmp_path: Path):
    """A job of two ranks at work: the job, its key, and the file that ends it."""
    stop = tmp_path / "stop"
    job = jobs(harness.python(2, script(WORK_UNTIL_STOPPED), str(stop)))
    key = job.wait_for("working", count=2)[0].split()[-1]
    assert re.fullmatch("[0-9a-f]{64}", key)
    yield job, key
    stop.touch()
    job.succeed()


def _inspect(user: int, pids: list[int]) -> dict[str, list[str]]:
    words = [sys.executable, "-I", "-c", PROGRAM, str(user), *map(str, pids)]
    done = subprocess.run(
        words, capture_output=True, text=True, check=True, timeout=harness.LIMIT_S
    )
    return json.loads(done.stdout)


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT RUN: only root can act as another user")
def test_another_user_of_the_host_sees_command_lines_and_nothing_else(job) -> None:
    job, key = job
    pids = job.members()
    assert len(pids) >= 3

    own = _inspect(0, pids)
    other = _inspect(NOBODY, pids)

    # The attempts are real: whoever may look finds something, the key and the shared memory too.
    assert key in "".join(own["environment"])
    assert all(own.values()), {name: len(found) for name, found in own.items()}
    assert len(other.pop("command line")) == len(pids)
    assert not any(other.values()), {name: len(found) for name, found in other.items()}
    assert key not in "".join(own["command line"])


def test_a_job_on_one_host_listens_on_the_loopback_only(job) -> None:
    job, _ = job
    bound = strangers.bound(job.members())
    assert any(family == "tcp" for family, _ in bound), bound
    for family, address in bound:
        if family != "unix":
            assert address[0] in ("127.0.0.1", "::1"), bound


def test_strangers_fill_no_log(job) -> None:
    job, _ = job
    before = len(job.stderr.splitlines())
    for place in strangers.listening(job.members()):
        for attempt in range(500):
            with strangers.connect(place) as connection:
                connection.sendall(b"horovod" if attempt % 2 else b"GET / HTTP/1.1\r\n\r\n")
    # That somebody knocks is told, with the address, by the launcher too: its rendezvous is one of the places.
    warning = "horovodrun: warning: closed a connection that is not part of the job"
    line = job.wait_for(warning)[0]
    assert re.match(re.escape(warning) + r" \(from=127\.0\.0\.1:\d+, why=", line), line
    lines = job.stderr.splitlines()[before:]
    assert len(lines) < 20, lines


def test_how_much_the_launcher_tells_of_strangers_is_a_setting(
    script, jobs, tmp_path: Path
) -> None:
    for level, is_shown in (("ERROR", False), ("WARNING", True)):
        stop = tmp_path / level
        words = [harness.HOROVODRUN, "-np", "1", "--log-level", level, sys.executable]
        job = jobs(harness.Job([*words, script(WORK_UNTIL_STOPPED), str(stop)]))
        job.wait_for("working")
        [place] = strangers.listening([job.process.pid])
        with strangers.connect(place) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
            # The launcher has closed it once this returns: then it has been reported, or not.
            assert connection.recv(1) == b""
        stop.touch()
        job.succeed()
        assert ("not part of the job" in job.stderr) == is_shown, job.report()


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT RUN: only root can act as another user")
def test_links_of_another_user_in_a_shared_folder_are_not_followed(jobs, tmp_path: Path) -> None:
    # pytest's folder is this user's alone; the one in it is like /tmp.
    shared, precious = tmp_path / "shared", tmp_path / "precious"
    shared.mkdir()
    shared.chmod(0o1777)
    precious.write_text("precious")
    for name in ("timeline.json", "tune.csv", "bench.json"):
        (shared / name).symlink_to(precious)
        os.lchown(shared / name, NOBODY, NOBODY)
    (shared / "output").symlink_to(tmp_path)
    os.lchown(shared / "output", NOBODY, NOBODY)

    refused = jobs(
        harness.horovodrun(1, ["true"], "--output-filename", str(shared / "output" / "of job"))
    )
    assert refused.fail() != 0
    assert '"output" is a link of the user 65534' in refused.stderr, refused.report()

    files = ["--timeline-filename", str(shared / "timeline.json"), "--autotune"]
    files += ["--autotune-log-file", str(shared / "tune.csv")]
    bench = [sys.executable, "-m", "horovod.bench", "barrier", "-n", "1"]
    job = jobs(harness.horovodrun(1, [*bench, "--json", str(shared / "bench.json")], *files))
    assert job.fail() != 0
    for name in ("timeline.json", "tune.csv", "bench.json"):
        assert f'"{name}" is a link of the user 65534' in job.stderr, job.report()
    assert precious.read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["precious", "shared"]
