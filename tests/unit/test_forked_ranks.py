"""Ranks that are forked from a process with their framework: tests see of them what they see of started ranks."""

from __future__ import annotations

import json
import os
import re
import signal
import sys

import pytest

import harness
import lanes

pytest.importorskip("torch")

# It looks like an import. Only the process that ranks are forked from takes the time for a real one.
IMPORT = '"""\nimport torch\n"""\n'
# Says on one line what a rank is given, save what is a job's or a process's own.
GIVEN = """
import json, os, random, signal, sys, tempfile
import numpy

def kind(fd):
    # Empty for a file, which is no connection to another process.
    try:
        target = os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:  # that of the list
        return ""
    return "" if target.startswith("/") else target.partition(":")[0]

own = ("HOROVOD_", "HVD_TEST_", "TMPDIR", "PWD")
shown = dict(part.split("=", 1) for part in open("/proc/self/environ").read().split("\\0") if "=" in part)
given = {
    "words": [sys.argv, sys.orig_argv, sys.executable, __name__, __file__, __doc__, sys.flags.dont_write_bytecode],
    "path": sys.path,
    "variables": {k: v for k, v in os.environ.items() if not k.startswith(own)},
    "hidden": sorted(set(os.environ.items()) - set(shown.items())),
    "folders": [os.getcwd() == os.environ["TMPDIR"] == tempfile.gettempdir(), os.listdir("/dev/shm"), os.umask(0)],
    "files": sorted(filter(None, map(kind, os.listdir("/proc/self/fd")))),
    "input": sys.stdin.read(),
    "group": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid(), sorted(os.sched_getaffinity(0))],
    "signals": [str(signal.getsignal(n)) for n in range(1, 32) if n != signal.SIGUSR1],
    "state": [line for line in open("/proc/self/status") if line.startswith(("SigBlk", "Uid", "Gid", "Threads"))],
    "main": [sys.modules["__main__"].__dict__ is globals(), sorted(globals())],
}
is_forked = b"forked_ranks.py" in open("/proc/self/cmdline", "rb").read()
line = json.dumps([given, [random.random(), numpy.random.random(), os.getpid()], is_forked, os.stat("/dev/shm").st_ino])
os.write(1, f"given {line}\\n".encode())
"""


def is_forked(pid: int) -> bool:
    return any(word.endswith(b"forked_ranks.py") for word in harness.command_line(pid))


def test_is_given_what_a_started_rank_is_given(script, jobs) -> None:
    path = script(IMPORT + GIVEN)
    given, own = {}, set()
    for forked in (False, True):
        job = jobs(harness.python(2, path, "a", "--b=c d", forked=forked)).succeed()
        lines = [json.loads(text) for text in re.findall(r"given (.*)", job.stdout)]
        assert len(lines) == 2, job.report()
        assert lines[0][0] == lines[1][0]
        given[forked] = lines[0][0]
        own |= {value for _, values, *_ in lines for value in values}
        assert [is_forked for *_, is_forked, _ in lines] == [forked, forked]
        if job.sees_shared_memory():
            assert {shm for *_, shm in lines} == {job.shm.stat().st_ino}
    for name, value in given[False].items():
        assert given[True][name] == value, name
    # Random numbers and processes are not those of another rank.
    assert len(own) == 2 * 2 * 3


HANGS = """
import os, threading

def stuck_here():
    os.write(1, f"process {os.getpid()} is there\\n".encode())
    threading.Event().wait()

stuck_here()
"""


def hanging(script, jobs, **options) -> tuple[harness.Job, list[int]]:
    """A job whose ranks hang, and their processes."""
    job = jobs(harness.python(2, script(IMPORT + HANGS), forked=True, **options))
    lines = job.wait_for("is there", count=2)
    return job, [int(re.search(r"process (\d+)", line)[1]) for line in lines]


def test_the_harness_sees_and_ends_forked_ranks(script, jobs) -> None:
    job, pids = hanging(script, jobs)
    assert all(map(is_forked, pids))
    assert set(pids) < set(job.members())
    stacks = job.report(stacks=True)
    assert stacks.count("in stuck_here") == 2, stacks
    job.kill()
    assert job.members() == []


def test_is_killed_with_the_process_that_the_launcher_has_started(script, jobs) -> None:
    job, pids = hanging(script, jobs)
    started = [pid for pid in job.members() if "HOROVOD_RANK" in harness.environment_of(pid)]
    os.kill(min(set(started) - set(pids)), signal.SIGKILL)
    assert job.fail() == 128 + signal.SIGKILL


ENDS = """
import os, signal, sys, threading
import horovod.numpy as hvd

def end(number, frame):
    os.write(1, b"the handler runs\\n")
    sys.exit(0)

signal.signal(signal.SIGTERM, end)
hvd.init()
if hvd.rank() == 1:
    hvd.barrier()
    threading.Event().wait()
for i in range(10000):
    print(f"line {i}: {'-' * 100}")
hvd.barrier()
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("sys.exit(7)", 7),
        ("os._exit(8)", 8),
        ("raise RuntimeError('bad luck')", 1),
        ("os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL),
        ("sys.stdout.flush(); os.abort()", 128 + signal.SIGABRT),
    ],
)
def test_its_end_is_the_end_of_the_rank(end: str, code: int, script, jobs) -> None:
    """And the other rank, which the launcher then ends, runs its handler of SIGTERM."""
    job = jobs(harness.python(2, script(f"{IMPORT}{ENDS}sys.stdout.flush()\n{end}\n"), forked=True))
    assert job.fail() == code
    assert job.stdout.count("the handler runs") == 1, job.report()
    assert [int(n) for n in re.findall(r"line (\d+): -{100}\n", job.stdout + "\n")] == [
        *range(10000)
    ]
    assert ("RuntimeError: bad luck" in job.stderr) == ("bad luck" in end)


@pytest.mark.parametrize("framework", ["jax", "keras", "tensorflow"])
def test_each_framework_can_be_imported_before_the_fork(framework: str, script, jobs) -> None:
    shows = "import os\nos.write(1, open('/proc/self/cmdline', 'rb').read() + b'\\n')\n"
    job = jobs(harness.python(1, script(f'"""\nimport {framework}\n"""\n{shows}'), forked=True))
    assert "forked_ranks.py" in job.succeed().stdout, job.report()


def test_its_processor_time_is_counted(script, jobs) -> None:
    computes = f"{IMPORT}import time\nwhile time.process_time() < 1.0: pass\n"
    before_s = lanes.processor_s()
    jobs(harness.python(2, script(computes), forked=True)).succeed().close()
    assert lanes.processor_s() - before_s >= 2.0


@pytest.mark.parametrize(
    ("text", "words", "variables"),
    [
        (IMPORT, (), {"PYTHONWARNINGS": "error"}),
        (IMPORT, (), {"OMP_NUM_THREADS": "2"}),
        (IMPORT, ("-u",), {}),
        (f"{IMPORT}import os; os.environ['TF_USE_LEGACY_KERAS'] = '1'", (), {}),
        ("import math", (), {}),
    ],
    ids=[
        "variable of Python",
        "other variable",
        "option of Python",
        "sets a variable",
        "no framework",
    ],
)
def test_anything_unusual_is_started(text: str, words, variables, script, jobs) -> None:
    path = script(
        f"{text}\nimport os\nos.write(1, open('/proc/self/cmdline', 'rb').read() + b'\\n')"
    )
    command = [sys.executable, *words, path]
    job = jobs(harness.horovodrun(1, command, env=variables, forked=True)).succeed()
    assert path.name in job.stdout, job.report()
    assert "forked_ranks" not in job.stdout, job.report()
