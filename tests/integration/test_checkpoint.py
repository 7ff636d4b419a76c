"""Pre-emption: a rank that has received SIGTERM ends at the end of a step, and the next job goes on from there."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

import harness

SCRIPT = """
import os, signal, sys
import numpy as np
import horovod.numpy as hvd
from horovod.common.elastic import ObjectState

hvd.init()
state = ObjectState(step=0, total=np.zeros(2, np.float32))
checkpoint = hvd.Checkpoint(state, sys.argv[1])
print("RESUMED", checkpoint.resume(), state.step, state.total.tolist(), flush=True)
checkpoint.end_step()  # from here on SIGTERM ends nothing at once
print("READY", os.getpid(), flush=True)
while state.step < 10:
    state.total = hvd.allreduce(state.total + 1, name="total", op=hvd.Average)
    state.step += 1
    if state.step == 4 and hvd.rank() in SIGNALLED:
        os.kill(os.getpid(), signal.SIGTERM)
    checkpoint.end_step()
print("DONE", state.step, state.total.tolist(), flush=True)
"""


@pytest.mark.parametrize("signalled", ["[1]", "[0, 1]"])
def test_all_ranks_save_and_end_at_the_end_of_the_step(
    script, jobs, tmp_path: Path, signalled: str
) -> None:
    path = str(tmp_path / "training")
    text = SCRIPT.replace("SIGNALLED", signalled)
    job = jobs(harness.python(2, script(text), path))
    assert job.fail() == 128 + signal.SIGTERM
    assert "DONE" not in job.stdout
    again = jobs(harness.python(2, script(SCRIPT.replace("SIGNALLED", "[]")), path)).succeed()
    assert again.stdout.count("RESUMED True 4 [4.0, 4.0]") == 2
    assert again.stdout.count("DONE 10 [10.0, 10.0]") == 2


def test_the_launchers_signal_ends_the_job_at_the_end_of_a_step(
    script, jobs, tmp_path: Path
) -> None:
    text = SCRIPT.replace("state.step < 10", "True").replace("SIGNALLED", "[]")
    path = tmp_path / "training"
    job = jobs(harness.python(2, script(text), str(path)))
    job.wait_for("READY", count=2)
    os.kill(job.process.pid, signal.SIGTERM)
    assert job.fail() == 128 + signal.SIGTERM
    assert path.exists()


ELASTIC = """
import os, pathlib, signal, sys
import numpy as np
import horovod.numpy as hvd
from horovod.common import elastic

hvd.init()
state = elastic.ObjectState(step=0, total=np.zeros(2, np.float32))
checkpoint = hvd.Checkpoint(state, sys.argv[1] + "/training")

@elastic.run
def train(state):
    if state.step == 0:
        checkpoint.resume()
    while state.step < 10:
        # Of all ranks the greatest, so that their number does not count.
        state.total = hvd.allreduce(state.total + 1, name="total", op=hvd.Max)
        state.step += 1
        print("STEP", state.step, os.getpid(), flush=True)
        if state.step == 4 and hvd.rank() == 1:
            print("PREEMPTED", os.getpid(), flush=True)
            os.kill(os.getpid(), signal.SIGTERM)
        checkpoint.end_step()

train(state)
print("DONE", state.step, state.total.tolist(), flush=True)
"""


def test_in_an_elastic_job_the_others_go_on_without_a_lost_step(
    script, jobs, tmp_path: Path
) -> None:
    command = [sys.executable, script(ELASTIC), str(tmp_path)]
    job = jobs(harness.horovodrun(2, command, "--min-np", "1", "-H", "localhost:2")).succeed()
    preempted = re.findall(r"PREEMPTED (\d+)", job.stdout)
    assert len(preempted) == 1, job.report()
    steps = re.findall(r"STEP (\d+) (\d+)", job.stdout)
    assert [int(step) for step, pid in steps if pid == preempted[0]] == [1, 2, 3, 4]
    others = {pid for _, pid in steps} - set(preempted)
    stayed = [[int(step) for step, of in steps if of == pid] for pid in others]
    assert list(range(1, 11)) in stayed, job.report()
    assert "DONE 10 [10.0, 10.0]" in job.stdout
