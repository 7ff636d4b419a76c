"""A job that stands still says who holds up whom and where in the script, and ends if it can never go on."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import harness
import horovod

# Reports come soon, so that tests do not take long; nothing below depends on how soon.
SOON = {"HOROVOD_STALL_DIAGNOSIS_SECONDS": "3"}

CIRCLE = """
import sys
import numpy as np
import horovod.numpy as hvd

hvd.init()

def evaluate(name):
    return hvd.allreduce(np.ones(4, np.float32), name=name)

for _ in range(3):
    hvd.allreduce(np.ones(2, np.float32), name="known to all")
try:
    evaluate(["left", "right", "left"][hvd.rank()])
except hvd.HorovodStalledError as error:
    print(f"rank {hvd.rank()} caught {len(str(error).splitlines())} lines", flush=True)
    sys.exit(3)
"""


def test_ranks_that_wait_for_each_other_in_a_circle_end_with_the_report(script, jobs) -> None:
    path = script(CIRCLE)
    job = jobs(harness.python(3, path, env=SOON))

    job.wait_for("caught", count=3)
    assert job.fail() == 3

    # Every rank's error is the headline; the report itself is there once, but for what the launcher may cite of it.
    assert job.stdout.count("caught 1 lines") == 3, job.report()
    assert "hvd.elastic.run" not in job.stderr, job.report()
    assert job.stderr.count("<stderr>:Who does not come:") == 1, job.report()
    for words in (
        "this job of 3 ranks has stood still",
        "will never end",
        "allreduce.left: asked for by ranks 0, 2, not by rank 1",
        "allreduce.right: asked for by rank 1, not by ranks 0, 2",
        "it waits for allreduce.right",
        "thread MainThread:",
        f"{path}:9 in evaluate",
        "Diverged:",
    ):
        assert words in job.stderr, f"{words!r} is missing\n{job.report()}"
    # That is for elastic jobs.
    assert "new workers" not in job.stderr, job.report()
    file = Path(re.search(r"This report is also in (\S+\.txt)\.", job.stderr)[1])
    assert f"{path}:9 in evaluate" in file.read_text()
    assert file.stat().st_mode & 0o077 == 0
    assert re.fullmatch(rf"horovod-stall-{re.escape(path.name)}-\d+-0\.txt", file.name)


LATE_RANK = """
import os, pathlib, signal, sys, time
import numpy as np
import horovod.numpy as hvd

go, pipe = pathlib.Path(sys.argv[1]), sys.argv[2]
there = [go.with_name(f"there {rank}") for rank in range(4)]
hvd.init()
rank = hvd.rank()
print(f"rank {rank} is process {os.getpid()}", flush=True)
hvd.barrier()

def compute():
    there[1].touch()
    while not go.exists():
        pass

def load_data():
    there[2].touch()
    with open(pipe) as file:
        file.read()

if rank == 0:
    # The others are looked at when it has waited for seconds.
    while not all(place.exists() for place in there[1:]):
        time.sleep(0.01)
if rank == 1:
    compute()
if rank == 2:
    load_data()
if rank == 3:
    there[3].touch()
    signal.raise_signal(signal.SIGSTOP)
print(f"sum {hvd.allreduce(np.ones(1, np.float32), op=hvd.Sum, name='late').item()}", flush=True)
"""


def test_ranks_that_compute_wait_or_are_stopped_are_told_apart_and_may_still_come(
    script, jobs, tmp_path
) -> None:
    go, pipe = tmp_path / "go", tmp_path / "pipe"
    os.mkfifo(pipe)
    path = script(LATE_RANK)
    job = jobs(harness.python(4, path, str(go), str(pipe), env=SOON))
    (stopped,) = job.wait_for("rank 3 is process")

    job.wait_for("Silent rank:")
    job.wait_for("For comparison, rank 0 ")
    for words in (
        r"rank 1 on \S+, process \d+: has not asked for allreduce\.late yet; it is at work",
        r"in compute",
        r"rank 2 on \S+, process \d+: has not asked for allreduce\.late; it waits for something else",
        r"in load_data",
        r"rank 3 on \S+: has not asked for allreduce\.late, and does not answer",
        r"For comparison, rank 0 ",
    ):
        assert re.search(words, job.stderr), f"{words!r} is missing\n{job.report()}"
    assert "will never end" not in job.stderr
    [place, *_] = job.wait_for("This report is also in ")
    file = Path(re.search(r"(\S+\.txt)\.", place)[1])
    assert file.exists()

    go.touch()
    pipe.write_text("data")
    os.kill(int(stopped.split()[-1]), signal.SIGCONT)
    job.succeed()
    assert job.stdout.count("sum 4.0") == 4
    assert not file.exists(), "the job has ended well"


STUCK_AMID = """
import os, sys
import numpy as np
import horovod.numpy as hvd

hvd.init()
print(f"rank {hvd.rank()} is process {os.getpid()}", flush=True)
gradient = np.ones(1 << 22, np.float32)
step = 0
while True:
    hvd.allreduce_(gradient, name="gradient")
    step += 1
    if step == 5:
        print("going round", flush=True)
"""


def test_a_rank_stopped_amid_collectives_is_named(script, jobs) -> None:
    job = jobs(harness.python(2, script(STUCK_AMID), env=SOON))
    job.wait_for("going round", count=2)
    lines = job.wait_for("is process", count=2)
    pids = {int(line.split("rank ")[1].split()[0]): int(line.split()[-1]) for line in lines}

    os.kill(pids[1], signal.SIGSTOP)

    job.wait_for("Silent rank:")
    job.wait_for(", and does not answer")
    assert re.search(r"rank 1 on \S+: has not (come|asked)", job.stderr), job.report()
    job.wait_for("allreduce.gradient")
    os.kill(pids[1], signal.SIGCONT)


UNFINISHED = """
import ctypes, threading
import numpy as np
import horovod.numpy as hvd
from horovod import _core
from horovod.common._c_functions import Operation

ALLGATHER, BARRIER, FLOAT32 = {codes}
pointer = ctypes.c_void_p

class Tensor(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_uint32), ("dtype", ctypes.c_uint8), ("device", ctypes.c_uint8)]
    _fields_ += [("input", pointer), ("output", pointer), ("dims", pointer), ("ndim", ctypes.c_size_t)]

@ctypes.CFUNCTYPE(None, pointer, pointer)
def never_returns(context, result):
    threading.Event().wait()

@ctypes.CFUNCTYPE(pointer, pointer, ctypes.c_size_t, ctypes.c_uint8, pointer, ctypes.c_size_t)
def allocate(*_):
    raise AssertionError("not called while the other call lasts")

def enqueue(kind, **fields):
    done = ctypes.cast(never_returns, pointer)
    operation = Operation(kind=kind, done=done, prescale=1, postscale=1, **fields)
    assert ctypes.CDLL(_core.__file__).horovod_enqueue(ctypes.byref(operation), None, 0) == 0

hvd.init()
values, dims = np.ones(2, np.float32), np.array([2], np.uint64)
if hvd.rank() == 1:
    enqueue(BARRIER, name=b"noname")
    tensor = Tensor(ctypes.sizeof(Tensor), FLOAT32, 0, values.ctypes.data, None, dims.ctypes.data, 1)
    address = ctypes.addressof(tensor)
    fields = dict(name=b"gathered", tensors=address, tensor_count=1)
    enqueue(ALLGATHER, allocate=ctypes.cast(allocate, pointer), **fields)
    threading.Event().wait()
hvd.barrier()
gathered = hvd.allgather_async(values, name="gathered")
hvd.allreduce(values, name="late")
"""


def test_what_a_rank_has_agreed_on_and_not_completed_is_listed(script, jobs) -> None:
    """A callback that never returns keeps the call for an operation's memory from being made."""
    header = (Path(horovod.__file__).parent / "include" / "horovod.h").read_text()
    names = ("HOROVOD_ALLGATHER", "HOROVOD_BARRIER", "HOROVOD_FLOAT32")
    codes = [int(re.search(rf"\b{name} = (\d+)", header)[1]) for name in names]
    job = jobs(harness.python(2, script(UNFINISHED.format(codes=codes)), env=SOON))

    job.wait_for("callbacks that have not returned: 2")
    job.wait_for("allreduce.late: asked for by rank 0, not by rank 1")

    assert "agreed on and not completed: 1, among them allgather.gathered" in job.stderr
