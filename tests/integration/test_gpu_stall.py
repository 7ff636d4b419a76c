"""Operations that do not end on GPUs, in whole jobs: every error says where the ranks are; the GPU is the double's."""

import re

import pytest

import gpu_double
import harness

# The only collective of each process is launched and never begins. One before it might take longer than the limit.
ENV = gpu_double.environment("devices=2,seed=3,never=1", HOROVOD_GPU_TIMEOUT="1")
SCRIPT = f"""
import signal, sys

sys.path.insert(0, {gpu_double.FOLDER!r})
import conftest  # the core's reader takes tensors of the double
import horovod.torch as hvd
import torch
from devices import OnGpu, on_gpu

from horovod import _core

hvd.init()
with OnGpu():
    tensor = on_gpu(torch.ones(4), hvd.rank())
    hvd.synchronize(hvd.allreduce_async_(tensor, name="never"))
    if hvd.rank() == 1 and sys.argv[1] == "stopped":
        signal.raise_signal(signal.SIGSTOP)
    try:
        _core.wait_for_devices()
    except hvd.HorovodInternalError as error:
        print(f"rank {{hvd.rank()}} blames {{error.rank}}: {{error}}", flush=True)
        raise
"""


@pytest.mark.parametrize("state", ["running", "stopped"])
def test_all_ranks_say_where_each_is_with_what_does_not_end(state, script, jobs) -> None:
    job = jobs(harness.python(2, script(SCRIPT), state, env=ENV))
    alive = 1 if state == "stopped" else 2
    for line in job.wait_for(" blames ", count=alive):
        assert "blames None: Horovod cannot go on, though no rank is lost: allreduce.never" in line
        assert "has been on GPUs for" in line
        assert "HOROVOD_GPU_TIMEOUT" in line
        where = r"rank 1 on \S+: does not answer" if alive == 1 else "launched, runs: ranks 0, 1"
        assert re.search(where, line), line
    job.fail()
    # The whole report, once; the launcher repeats the last lines of a rank that failed.
    assert job.stderr.count("[0]<stderr>:Where its 2 ranks are") == 1, job.report()
    assert "[1]<stderr>:Where" not in job.stderr, job.report()
