"""A signal that arrives while the main thread is in a framework's native code, where it waits for an operation."""

from __future__ import annotations

import os
import signal

import pytest

import harness

SOON = {"HOROVOD_STALL_DIAGNOSIS_SECONDS": "3"}
HANDLER = """
import os, signal, sys, threading

def end(number, frame):
    print("the handler runs", flush=True)
    os._exit(7)

for number in (signal.SIGINT, signal.SIGALRM, signal.SIGTERM):
    signal.signal(number, end)

def begin(hvd):
    hvd.init()
    print(f"rank {hvd.rank()} is process {os.getpid()}", flush=True)
    if hvd.rank() == 1:
        threading.Event().wait()
"""
TENSORFLOW = """
import tensorflow as tf
import horovod.tensorflow as hvd

begin(hvd)
call = lambda x: hvd.allreduce(x, name="a")
if sys.argv[1] == "graph":
    call = tf.function(call)
call(tf.ones(4))
"""
JAX = """
import jax, jax.numpy as jnp
import horovod.jax as hvd

begin(hvd)
jax.jit(lambda x: hvd.allreduce(x, name="a"))(jnp.ones(4)).block_until_ready()
"""
PROGRAMS = [
    pytest.param(TENSORFLOW, "eager", signal.SIGINT, id="tensorflow-eager-SIGINT"),
    pytest.param(TENSORFLOW, "graph", signal.SIGINT, id="tensorflow-graph-SIGINT"),
    pytest.param(TENSORFLOW, "graph", signal.SIGALRM, id="tensorflow-graph-SIGALRM"),
    pytest.param(TENSORFLOW, "eager", signal.SIGTERM, id="tensorflow-eager-SIGTERM"),
    pytest.param(JAX, "jit", signal.SIGINT, id="jax-jit-SIGINT"),
]


@pytest.mark.parametrize(("program", "word", "number"), PROGRAMS)
def test_its_handler_runs(script, jobs, program: str, word: str, number: signal.Signals) -> None:
    env = {"TF_CPP_MIN_LOG_LEVEL": "3", **SOON}
    if number != signal.SIGINT:
        env["HOROVOD_SIGNAL_GRACE_SECONDS"] = "1"
    job = jobs(harness.python(2, script(HANDLER + program), word, env=env))
    (line,) = job.wait_for("rank 0 is process")
    # Then the operation is pending, and the thread is in native code.
    job.wait_for("Missing call:")

    os.kill(int(line.split()[-1]), number)

    job.wait_for("the handler runs")
    assert job.fail() == 7
    assert f"the handler of {number.name} could not run" in job.stderr, job.report()


PUT_OFF = """
import ctypes, pathlib, sys, threading
import horovod.numpy as hvd

call, come = map(pathlib.Path, sys.argv[1:])
hvd.init()

@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
def say(_):
    print("called", flush=True)
    return 0

def put_off():
    call.read_text()
    ctypes.pythonapi.Py_AddPendingCall(say, None)

if hvd.rank() == 0:
    threading.Thread(target=put_off, daemon=True).start()
else:
    come.read_text()
print(hvd.allgather_object(hvd.rank()), flush=True)
"""


def test_a_wait_of_horovod_lets_python_call_what_it_has_put_off(script, jobs, tmp_path) -> None:
    call, come = tmp_path / "call", tmp_path / "come"
    os.mkfifo(call)
    os.mkfifo(come)
    job = jobs(harness.python(2, script(PUT_OFF), str(call), str(come), env=SOON))
    # Then rank 0 waits.
    job.wait_for("Missing call:")
    call.write_text("")
    job.wait_for("called")
    come.write_text("")
    job.succeed()
