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
    assert f"rank {bad} was lost 3 times without a commit" in job.stderr, job.report()
    assert job.stderr.count("KeyError: 'no such sample'") >= 3
    report = [line for line in job.stderr.splitlines() if line.startswith("horovodrun: ")]
    assert any("exited with code 1" in line for line in report[-3:]), job.report()


TURNS = """
import pathlib, sys
import numpy as np
import horovod.numpy as hvd
from horovod.common import elastic

failures = pathlib.Path(sys.argv[1])
hvd.init()

@elastic.run
def train(state):
    # No rank adds to the file before all have read it.
    bad = failures.stat().st_size % 2
    while state.step < 1000:
        hvd.allreduce(np.ones(3), name="gradients")
        state.step += 1
        if state.step == 3 and hvd.rank() == bad:
            with failures.open("a") as file:
                file.write("x")
            raise KeyError("no such sample")

train(elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=0))
"""


def test_an_exception_that_two_ranks_raise_in_turn_ends_the_job(script, jobs, tmp_path) -> None:
    """As where samples are dealt out anew in each attempt."""
    failures = tmp_path / "failures"
    failures.write_text("")
    options = ["--min-np", "2"]
    job = jobs(harness.python(2, script(TURNS), str(failures), options=options, env=PATIENT))
    assert job.fail() == 1
    assert "was lost 3 times without a commit" in job.stderr, job.report()
    assert failures.stat().st_size == 5, job.report()


ALONE_IN_BETWEEN = """
import numpy as np
import horovod.numpy as hvd
from horovod.common import elastic

hvd.init()

@elastic.run
def train(state):
    while state.step < 1000:
        hvd.allreduce(np.ones(3), name="gradients")
        if hvd.size() == 1:
            state.check_host_updates()  # ends when a new rank is there
            continue
        state.step += 1
        if state.step == 3 and hvd.rank() == 1:
            raise KeyError("no such sample")

train(elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=0))
"""


def test_losses_of_a_rank_are_counted_while_the_others_train_without_it(script, jobs) -> None:
    options = ["--min-np", "1"]
    job = jobs(harness.python(2, script(ALONE_IN_BETWEEN), options=options, env=PATIENT))
    assert job.fail() == 1
    assert "rank 1 was lost 3 times without a commit" in job.stderr, job.report()
    assert job.stderr.count("KeyError: 'no such sample'") >= 3
