"""Ranks that wait for each other where frameworks are called back, so that no thread is seen to wait."""

from __future__ import annotations

import pytest

import harness

TENSORFLOW = """
import sys
import tensorflow as tf
import horovod.tensorflow as hvd

hvd.init()
x = tf.ones(4)

def sum_it():
    return hvd.allreduce(x, name="a")

def spread_it():
    return hvd.broadcast(x, 0, name="b")

call = sum_it if hvd.rank() == 0 else spread_it
if sys.argv[1] != "eager":
    call = tf.function(call, jit_compile=sys.argv[1] == "jit")
call()
"""
JAX = """
import jax
import jax.numpy as jnp
import horovod.jax as hvd

hvd.init()

def sum_it(x):
    return hvd.allreduce(x, name="a")

def spread_it(x):
    return hvd.broadcast(x, 0, name="b")

call = jax.jit(sum_it if hvd.rank() == 0 else spread_it)
call(jnp.ones(4)).block_until_ready()
"""
# One rank has a batch less. So it averages metrics, while the other one sends gradients, of which there are more than a
# rank tells by name.
FIT = """
import keras, numpy as np
import horovod.keras as hvd

hvd.init()
layers = [keras.layers.Dense(2) for _ in range(20)]
model = keras.Sequential([keras.Input((2,)), *layers])
model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
rows = 4 - hvd.rank()
callbacks = [hvd.callbacks.MetricAverageCallback()]
model.fit(np.ones((rows, 2)), np.ones((rows, 2)), batch_size=1, verbose=0, callbacks=callbacks)
"""
PROGRAMS = [
    pytest.param(TENSORFLOW, "eager", id="tensorflow-eager"),
    pytest.param(TENSORFLOW, "graph", id="tensorflow-graph"),
    pytest.param(TENSORFLOW, "jit", id="tensorflow-jit"),
    pytest.param(FIT, "tensorflow", id="keras-tensorflow"),
    pytest.param(JAX, "jit", id="jax-jit"),
]


# On rank 1 a thread computes and will then sum, while the main thread waits for what comes after.
STRAGGLER = """
import os, pathlib, sys, threading
import jax
import jax.numpy as jnp
import horovod.jax as hvd

go = pathlib.Path(sys.argv[1])
hvd.init()
rank = hvd.rank()

def say(*words):
    # One write: `print` of two threads mixes the words of their lines.
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def step():
    while rank == 1 and not go.exists():
        pass
    sum_it = jax.jit(lambda x: hvd.allreduce(x, name="a", op=hvd.Sum))
    say("sum", float(sum_it(jnp.ones(4))[0]))

thread = threading.Thread(target=step)
thread.start()
if rank == 0:
    thread.join()
say("ranks", hvd.allgather_object(rank, name="ranks"))
thread.join()
"""


def test_a_rank_is_waited_for_whose_main_thread_waits_while_another_computes(
    script, jobs, tmp_path
) -> None:
    go = tmp_path / "go"
    env = {"HOROVOD_STALL_DIAGNOSIS_SECONDS": "3"}
    job = jobs(harness.python(2, script(STRAGGLER), str(go), env=env))
    job.wait_for("it is at work")
    go.touch()
    job.succeed()
    for words in ("sum 2.0", "ranks [0, 1]"):
        assert job.stdout.count(words) == 2, job.report()
    assert "will never end" not in job.stderr, job.report()


@pytest.mark.parametrize(("program", "word"), PROGRAMS)
def test_a_circle_ends_the_job_and_names_both_sides(script, jobs, program: str, word: str) -> None:
    env = {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
    job = jobs(harness.python(2, script(program), word, env=env, forked=True))
    job.fail()
    harness.assert_circle(job)
