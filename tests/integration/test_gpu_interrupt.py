"""Ctrl-C on a rank that waits on the host for a GPU whose work never ends; the GPU is the double's."""

import os
import signal

import pytest

import gpu_double
import harness

# The second collective of each process is launched and never begins.
ENV = gpu_double.environment("devices=2,seed=3,never=2", HOROVOD_GPU_TIMEOUT="0")
SCRIPT = f"""
import os, signal, sys

sys.path.insert(0, {gpu_double.FOLDER!r})
import conftest  # the core's reader takes tensors of the double
import horovod.torch as hvd
import torch
from devices import OnGpu, on_gpu

from horovod import _core

def interrupt(signum, frame):
    # Elsewhere, as in the double's Python that tells the current stream, an exception may be lost.
    if frame.f_code.co_name not in ("<lambda>", "synchronize"):
        os.write(1, b"interrupted too early\\n")
        return
    raise KeyboardInterrupt

hvd.init()
signal.signal(signal.SIGINT, interrupt)
wait_on_host = {{
    "wait_for_devices": lambda handle: (hvd.synchronize(handle), _core.wait_for_devices()),
    "synchronize": hvd.synchronize,
}}[sys.argv[1]]
with OnGpu():
    tensor = on_gpu(torch.ones(4), hvd.rank())
    hvd.allreduce_(tensor, name="first")
    handle = hvd.allreduce_async_(tensor, name="never")
    try:
        print("waits", os.getpid(), flush=True)
        wait_on_host(handle)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        os._exit(7)
"""


@pytest.mark.parametrize(
    ("wait", "asynchronous"), [("wait_for_devices", "1"), ("synchronize", "0")]
)
def test_a_wait_for_a_gpu_that_never_ends_can_be_interrupted(
    wait, asynchronous, script, jobs
) -> None:
    env = {**ENV, "HOROVOD_ENABLE_ASYNC_COMPLETION": asynchronous}
    job = jobs(harness.python(2, script(SCRIPT), wait, env=env))
    pid = int(job.wait_for("waits ", count=2)[0].split()[-1])

    count, line = 0, "too early"
    while "too early" in line:
        os.kill(pid, signal.SIGINT)
        count += 1
        line = job.wait_for("interrupted", count=count)[-1]

    assert job.fail() == 7
