"""Ranks and launchers that die: the others hear of it in time, and nothing is left behind."""

from __future__ import annotations

import os
import re
import signal
import socket

import pytest

import harness

# Survivors ignore SIGTERM to show that the error reaches them by itself, not that the launcher ended them.
REDUCE_FOR_EVER = """
import os, signal, sys, time
import numpy as np
import horovod.numpy as hvd

signal.signal(signal.SIGTERM, signal.SIG_IGN)
hvd.init()
rank = hvd.rank()
print(f"rank {rank} is process {os.getpid()}", flush=True)
tensor = np.ones(int(sys.argv[1]), np.float32)
try:
    step = 0
    while True:
        hvd.allreduce(tensor, name="gradient")
        step += 1
        if step == 10:
            print("reducing", flush=True)
except hvd.HorovodInternalError as error:
    print(f"rank {rank} caught: {error}", flush=True)
    print(f"fields: {error.rank} {error.host} {error.cause}", flush=True)
    sys.exit(3)
"""


@pytest.mark.parametrize(
    ("victim", "elements"),
    [(1, 1 << 22), (2, 1), (0, 1 << 20)],
    ids=["middle of a large one", "small ones", "the coordinator"],
)
def test_killed_rank_raises_on_all_others_naming_rank_host_and_cause(
    victim, elements, script, jobs
) -> None:
    # At once, and not because somebody is silent.
    env = {"HOROVOD_HEARTBEAT_TIMEOUT_SECONDS": "0"}
    job = jobs(harness.python(3, script(REDUCE_FOR_EVER), str(elements), env=env))
    pids = _pids(job, 3)
    job.wait_for("reducing", count=3)

    os.kill(pids[victim], signal.SIGKILL)
    caught = job.wait_for("caught:", count=2)
    fields = job.wait_for("fields: ", count=2)
    code = job.fail()

    assert code == 128 + signal.SIGKILL
    for line in caught:
        assert re.search(rf"rank {victim}\b", line.split("caught:")[1])
        assert socket.gethostname() in line or "localhost" in line
        assert "signal 9" in line or "SIGKILL" in line
    assert {re.search(r"rank (\d) caught", line)[1] for line in caught} == {"0", "1", "2"} - {
        str(victim)
    }
    for line in fields:
        rank, host, cause = line.split("fields: ")[1].split(" ", 2)
        assert (rank, host in {socket.gethostname(), "localhost"}) == (str(victim), True), line
        assert "signal 9" in cause, line
    first = next(line for line in job.stderr.splitlines() if "<std" not in line)
    assert re.search(rf"\b{victim}\b", first), (
        f"the launcher's first words name another rank\n{job.report()}"
    )


@pytest.mark.parametrize(
    ("farewell", "status"),
    [("os._exit(7)", 7), ("raise RuntimeError('bad luck')", 1), ("sys.exit(4)", 4)],
    ids=["no clean-up", "an exception", "exit status"],
)
def test_rank_that_ends_early_fails_the_others_and_gives_its_exit_code(
    farewell, status, script, jobs
) -> None:
    path = script(
        f"""
import os, signal, sys
import numpy as np
import horovod.numpy as hvd

signal.signal(signal.SIGTERM, signal.SIG_IGN)
hvd.init()
rank = hvd.rank()
try:
    for step in range(1000000):
        hvd.allreduce(np.ones(10, np.float32), name="x")
        if rank == 1 and step == 5:
            print("last words of rank 1", flush=True)
            {farewell}
except hvd.HorovodInternalError as error:
    print(f"rank {{rank}} caught: {{error}}", flush=True)
    sys.exit(9)
"""
    )
    job = jobs(harness.python(3, path))
    caught = job.wait_for(" caught: ", count=2)
    code = job.fail()

    assert code == status
    assert all("rank 1" in line.split("caught:")[1] for line in caught)
    summary = "\n".join(
        line for line in job.stderr.splitlines() if not re.match(r"\[\d\]<std", line)
    )
    assert "last words of rank 1" in summary or "bad luck" in summary, job.report()


WITHOUT_DESCRIPTORS = """
import os, resource
import horovod.numpy as hvd

if os.environ["HOROVOD_RANK"] == "1":
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
    held = []
    try:
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
hvd.init()
"""


def test_a_rank_that_can_open_nothing_says_so_instead_of_trying_on(script, jobs) -> None:
    job = jobs(harness.python(2, script(WITHOUT_DESCRIPTORS)))
    job.fail()
    why = "rank 1: cannot connect to the rendezvous: Too many open files"
    assert why in job.stderr, job.report()
    assert "raise the limit (`ulimit -n 4096`)" in job.stderr, job.report()


def test_rank_that_finishes_early_with_success_fails_the_waiting_ones(script, jobs) -> None:
    path = script(
        """
import sys
import numpy as np
import horovod.numpy as hvd

hvd.init()
rank = hvd.rank()
hvd.allreduce(np.ones(1, np.float32), name="first")
if rank == 0:
    sys.exit(0)
try:
    hvd.allreduce(np.ones(1, np.float32), name="second")
except hvd.HorovodInternalError as error:
    print(f"rank {rank} caught: {error}", flush=True)
    sys.exit(0)
sys.exit(5)
"""
    )
    job = jobs(harness.python(3, path))
    caught = job.wait_for(" caught: ", count=2)
    job.wait()
    job.assert_nothing_left()
    for line in caught:
        assert "the script of rank 0 has ended" in line, line
        assert "hvd.join()" in line


ENDS_BY_AN_EXCEPTION = """
import sys
from horovod import _core
from horovod.common.basics import basics

basics.init()
if _core.rank() == 0:
    raise RuntimeError("bad luck")
try:
    _core.barrier(0)
except RuntimeError as error:
    print(f"caught: {error}", flush=True)
    sys.exit(0)
sys.exit(5)
"""


def test_who_waits_for_a_script_that_ended_by_an_exception_is_told(script, jobs) -> None:
    job = jobs(harness.python(2, script(ENDS_BY_AN_EXCEPTION)))
    job.fail()
    assert "the script of rank 0 has ended with an exception" in job.stdout, job.report()


# Rank 0 ends while many of its threads wait. The sum holds the interpreter's lock after Horovod has been shut down: a
# thread that comes back from its wait then is still within the framework's C++ when the interpreter ends.
WAITING_AT_EXIT = """
import atexit, functools, threading, time
import torch
import horovod.torch as hvd
from horovod import _core

atexit.register(lambda: sum(range(20_000_000)))
hvd.init()
if hvd.rank() == 0:
    threading.excepthook = lambda _: None
    for number in range(100):
        # The tensor is made here: what the framework's own calls do at the end is not ours.
        call = functools.partial(hvd.allreduce, torch.ones(1), name=f"never.{number}")
        threading.Thread(target=lambda call=call: call(), daemon=True).start()
    while len(_core.handles()) < 100:
        time.sleep(0.001)
hvd.barrier()
print("done", flush=True)
"""


def test_threads_that_wait_at_the_end_of_a_script_do_not_spoil_it(script, jobs) -> None:
    path = script(WAITING_AT_EXIT)
    for _ in range(3):
        job = jobs(harness.python(2, path)).succeed()
        assert job.stdout.count("done") == 2


WAIT_FOR_NOBODY = """
import subprocess, sys
import numpy as np
import horovod.numpy as hvd

hvd.init()
# A child in its own session that nobody waits for: the launcher must find it too.
subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"], start_new_session=True)
print("waiting", flush=True)
if hvd.rank() == 0:
    hvd.allreduce(np.ones(1, np.float32), name="only rank 0 asks")
else:
    import threading
    threading.Event().wait()
"""


INTERRUPTIBLE = """
import os, sys
import numpy as np
import horovod.numpy as hvd

hvd.init()
print(f"rank {hvd.rank()} is process {os.getpid()}", flush=True)
tensor = np.ones(int(sys.argv[2]), np.float32)
call = {
    "allreduce": lambda: hvd.allreduce(tensor, name="gradient"),
    "allgather": lambda: hvd.allgather(tensor, name="gathered"),
}[sys.argv[1]]
try:
    step = 0
    while True:
        call()
        step += 1
        if step == 10:
            print("going round", flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    os._exit(7)
"""


@pytest.mark.parametrize(
    ("operation", "elements"), [("allreduce", 1), ("allreduce", 1 << 22), ("allgather", 1 << 20)]
)
def test_a_rank_that_waits_for_a_frozen_one_can_be_interrupted(
    operation, elements, script, jobs
) -> None:
    job = jobs(harness.python(2, script(INTERRUPTIBLE), operation, str(elements)))
    pids = _pids(job, 2)
    job.wait_for("going round", count=2)

    os.kill(pids[1], signal.SIGSTOP)  # wherever it stands; the harness ends it all the same
    os.kill(pids[0], signal.SIGINT)

    job.wait_for("interrupted")
    assert job.fail() == 7


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_interrupted_launcher_ends_all_ranks(number, script, jobs) -> None:
    job = jobs(harness.python(2, script(WAIT_FOR_NOBODY)))
    job.wait_for("waiting", count=2)

    job.process.send_signal(number)

    assert job.fail() == 128 + number


def test_nothing_outlives_a_launcher_killed_with_sigkill(script, jobs) -> None:
    job = jobs(harness.python(2, script(WAIT_FOR_NOBODY)))
    job.wait_for("waiting", count=2)

    job.process.kill()

    assert job.wait() == 137
    job.assert_nothing_left()


def test_rank_that_ignores_sigterm_is_ended_all_the_same(script, jobs) -> None:
    path = script(
        """
import os, signal, threading

signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("stubborn", flush=True)
if os.environ["HOROVOD_RANK"] == "0":
    threading.Event().wait()
"""
    )
    # Rank 1 ends at once with a failure; rank 0 will not listen.
    job = jobs(
        harness.horovodrun(
            2, ["sh", "-c", f'{harness.sys.executable} {path}; [ "$HOROVOD_RANK" = 0 ] || exit 6']
        )
    )
    assert job.fail() == 6


def _pids(job: harness.Job, size: int) -> dict[int, int]:
    lines = job.wait_for(" is process ", count=size)
    found = [re.search(r"rank (\d+) is process (\d+)", line) for line in lines]
    return {int(match[1]): int(match[2]) for match in found}
