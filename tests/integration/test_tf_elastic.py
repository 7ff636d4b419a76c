"""An elastic job with TensorFlow: a killed rank is replaced, and no committed step is lost."""

from __future__ import annotations

import re
import sys

import harness

# Gradients depend on the number of the step alone, and the largest of all ranks counts: weights must be those of an
# undisturbed run with as many steps, bit by bit. All functions are traced once in a process's life.
WORKER = """
import os, signal, sys
from pathlib import Path

import numpy as np
import tensorflow as tf

import horovod.tensorflow as hvd

folder = Path(sys.argv[1])
START = np.arange(6.0).reshape(2, 3)
weights = tf.Variable(START + os.getpid())  # nobody begins alike
velocity = tf.Variable(tf.zeros_like(weights))


@tf.function
def train_one_batch(number):
    factor = tf.cast(number % 5 - 2, tf.float64) * 0.125
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(weights) * factor
    tape = hvd.DistributedGradientTape(tape, op=hvd.Max)
    (gradient,) = tape.gradient(loss, [weights])
    velocity.assign(velocity * 0.5 + gradient)
    weights.assign_sub(velocity)
    # Not of a constant: TensorFlow would compute that once for all.
    one = tf.cast(number >= 0, tf.float32)
    return hvd.size_op(), hvd.allreduce(one, op=hvd.Sum, name="members")


@hvd.elastic.run
def train(state):
    seen = None
    while hvd.size() < 3 or state.batch < 20:
        if state.batch == 7 and hvd.rank() == 1 and not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        size, members = (int(n) for n in train_one_batch(tf.constant(state.batch)))
        assert size == members == hvd.size(), (size, members, hvd.size())
        if size != seen:
            print(f"graph of {size} ranks from step {state.batch}", flush=True)
            seen = size
        state.batch += 1
        state.commit()


hvd.init()
if hvd.rank() == 0:
    weights.assign(START)
state = hvd.elastic.TensorFlowState([weights, velocity], batch=0)
train(state)
expected, moving = START, np.zeros_like(START)
for number in range(state.batch):
    moving = moving * 0.5 + (number % 5 - 2) * 0.125
    expected = expected - moving
assert (weights.numpy() == expected).all(), (weights.numpy(), expected)
print(f"done: rank {hvd.rank()} of {hvd.size()}, step {state.batch}", flush=True)
"""


def test_a_killed_rank_is_replaced_and_no_committed_step_is_lost(script, jobs, tmp_path) -> None:
    command = [sys.executable, script(WORKER), str(tmp_path)]
    job = jobs(
        harness.horovodrun(
            3,
            command,
            "--min-np",
            "2",
            "-H",
            "localhost:3",
            env={"TF_CPP_MIN_LOG_LEVEL": "3"},
        )
    ).succeed()
    assert "was killed by signal 9 (SIGKILL)" in job.stderr
    done = set(re.findall(r"done: rank (\d) of 3, step (\d+)", job.stdout))
    assert {rank for rank, _ in done} == {"0", "1", "2"}, job.report()
    assert len({step for _, step in done}) == 1
    # The graph traced with three ranks went on with two, from the step that was not committed.
    assert "graph of 3 ranks from step 0" in job.stdout
    assert "graph of 2 ranks from step 7" in job.stdout


# The members of a set are looked up each time a graph runs: the graph is traced once.
SETS = """
import os, signal, sys
from pathlib import Path

import tensorflow as tf

import horovod.tensorflow as hvd

folder = Path(sys.argv[1])
pair, first = hvd.ProcessSet([0, 1]), hvd.ProcessSet([0])
hvd.init(process_sets=[pair, first])
traces = []
state = hvd.elastic.TensorFlowState([tf.Variable(0.0)], batch=0)
table = tf.Variable(tf.zeros((5, 2)))


@tf.function
def gradients(x):
    traces.append(x)
    results = []
    for members in (pair, first):
        with tf.GradientTape() as tape:
            tape.watch(x)
            rows = tf.gather(table, [tf.cast(x, tf.int32)])
            loss = x * x + x * tf.reduce_sum(rows)
        tape = hvd.DistributedGradientTape(tape, process_set=members)
        gradient, slices = tape.gradient(loss, [x, table])
        results += [gradient, tf.convert_to_tensor(slices)[:, 0]]
    return results


@hvd.elastic.run
def train(state):
    while hvd.size() < 4 or state.batch < 10:
        if state.batch == 3 and hvd.rank() == 3 and not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        rank = hvd.rank()
        results = [r.numpy().tolist() for r in gradients(tf.constant(rank + 1.0))]
        own = 2.0 * (rank + 1), [float(row == rank + 1) * (rank + 1.0) for row in range(5)]
        both = own if rank >= 2 else (3.0, [0.0, 0.5, 1.0, 0.0, 0.0])
        assert results == [*both, *own], results
        # Everybody takes part in something, so that a lost rank is seen.
        hvd.allreduce(tf.ones(()), name="everybody")
        print(f"right with {hvd.size()} ranks", flush=True)
        state.batch += 1
        state.commit()


train(state)
assert len(traces) <= 1  # none on a rank that comes when all is done
print(f"done: rank {hvd.rank()} of {hvd.size()}", flush=True)
"""


def test_process_sets_inside_a_graph_follow_the_ranks(script, jobs, tmp_path) -> None:
    command = [sys.executable, script(SETS), str(tmp_path)]
    elastic = ["--min-np", "3", "-H", "localhost:4"]
    env = {"TF_CPP_MIN_LOG_LEVEL": "3"}
    job = jobs(harness.horovodrun(4, command, *elastic, env=env)).succeed()
    assert "right with 3 ranks" in job.stdout
    assert len(re.findall(r"done: rank \d of 4", job.stdout)) == 4, job.report()
