"""Calls of XLA's programs on a GPU when there is no job, and when a rank dies; the GPUs are the double's."""

from __future__ import annotations

import os
import re
import signal

import pytest

import gpu_double
import harness

ENV = gpu_double.environment("devices=2,seed=5")
HEAD = f"""
import os, signal, sys

sys.path.insert(0, {gpu_double.FOLDER!r})
import torch
from cuda_double import on_gpu
from double_streams import count, current_stream, violations
from xla_frames import Call, Memory, Place, XlaError

import horovod.torch as hvd
from horovod import _core

def allreduce(tensor, name):
    memory = Memory.of(tensor)
    place = Place(DEVICE, current_stream(DEVICE).cuda_stream)
    Call(name=name).run("horovod_xla_cuda_allreduce", [memory], [memory], place)

def tell(when, call, *args):
    try:
        call(*args)
        print(when, "went well", flush=True)
    except (XlaError, hvd.HorovodInternalError) as error:
        print(when, f"({{getattr(error, 'code', None)}}):", error, flush=True)
"""

BEFORE_INIT = f"""{HEAD}
DEVICE = 0
tensor = on_gpu(torch.ones(2))
tell("before init", allreduce, tensor, "early")
print("calls of CUDA:", count("cuInit"), flush=True)
"""


def test_before_init(script, jobs) -> None:
    job = jobs(harness.python(1, script(BEFORE_INIT), env=ENV)).succeed()
    assert "before init (9): ValueError: Horovod has not been initialized" in job.stdout
    assert "calls of CUDA: 0" in job.stdout


LOSS = f"""{HEAD}
hvd.init()
DEVICE = hvd.rank()
tensor = on_gpu(torch.ones(4), DEVICE)
if sys.argv[1] == "before":
    allreduce(tensor, "first")
    print("first is done", os.getpid() if hvd.rank() else "", flush=True)
    if hvd.rank():
        signal.pause()
    tell("the call", allreduce, tensor, "second")
else:
    # It is launched on both ranks, and never begins.
    allreduce(tensor, "first")
    print("launched", os.getpid() if hvd.rank() else "", flush=True)
    if hvd.rank():
        signal.pause()
    tell("the wait", _core.wait_for_devices)
    tell("the next call", allreduce, tensor, "second")
print("violations:", violations(), flush=True)
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_rank_that_dies(when, script, jobs) -> None:
    env = ENV if when == "before" else {**ENV, "GPU_DOUBLE": "devices=2,seed=5,never=1"}
    job = jobs(harness.python(2, script(LOSS), when, env=env))
    line = {"before": "first is done ", "after": "launched "}[when]
    lines = job.wait_for(line, count=2)
    pid = next(found for found in map(re.compile(rf"{line}(\d+)").search, lines) if found)[1]
    os.kill(int(pid), signal.SIGKILL)

    job.fail()

    if when == "before":
        expected = [r"the call \(2\): HorovodInternalError: .*rank 1"]
    else:
        expected = [
            r"the wait \(None\): .*rank 1",
            r"the next call \(2\): HorovodInternalError: .*rank 1",
        ]
    for words in expected:
        assert re.search(words, job.stdout), job.report()
    assert "violations: []" in job.stdout, job.report()


HOST_WAITS = f"""{HEAD}
hvd.init()
DEVICE = hvd.rank()
tensor = on_gpu(torch.ones(4), DEVICE)
tell("the call", allreduce, tensor, "never")
"""


def test_a_setting_has_the_call_wait_for_the_gpu(script, jobs) -> None:
    """And an operation that never ends is an error of the call itself then."""
    env = {
        **ENV,
        "GPU_DOUBLE": "devices=2,seed=5,never=1",
        "HOROVOD_ENABLE_ASYNC_COMPLETION": "0",
        "HOROVOD_GPU_TIMEOUT": "1",
    }
    job = jobs(harness.python(2, script(HOST_WAITS), env=env))
    job.wait()
    expected = re.findall(r"the call \(2\): HorovodInternalError: .*", job.stdout)
    assert len(expected) == 2, job.report()
