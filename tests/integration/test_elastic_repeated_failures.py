"""A script that fails at the same step again and again ends its elastic job, with that failure."""

from __future__ import annotations

import pytest

import harness

# Slots that fail often would rest for a minute.
PATIENT = {"HOROVOD_ELASTIC_SLOT_FAILURES": "100"}
SCRIPT = """
import numpy as np
import horovod.numpy as hvd
from horovod.common import elastic

hvd.init()

@elastic.run
def train(state):
    while state.step < {steps}:
        hvd.allreduce(np.ones(3), name="gradients")
        state.step += 1
        if state.step == 3 and hvd.rank() == {bad}:
            raise KeyError("no such sample")
        if {commits}:
            state.commit()

train(elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=0))
print("done")
"""


@pytest.mark.parametrize("bad", [0, 1])
def test_an_exception_that_repeats_on_the_same_rank_ends_the_job(script, jobs, bad) -> None:
    """Also of rank 0: then each rank that is left becomes rank 0, and a new one takes the last place."""
    path = script(SCRIPT.format(steps=1000, bad=bad, commits="state.step < 3"))
    job = jobs(harness.python(2, path, options=["--min-np", "2"], env=PATIENT))
    assert job.fail() == 1
    assert f"rank {bad} was lost 3 times in a row without a commit" in job.stderr, job.report()
    assert job.stderr.count("KeyError: 'no such sample'") >= 3
    report = [line for line in job.stderr.splitlines() if line.startswith("horovodrun: ")]
    assert any("exited with code 1" in line for line in report[-3:]), job.report()
