"""Whole jobs with TensorFlow's operations: few threads, a rank that is killed, a library that registers nothing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import harness

LIBRARY = harness.ROOT / "python/horovod/tensorflow/libhorovod_tensorflow.so"

# One thread of TensorFlow for all operations.
ONE_THREAD = """
import threading
import tensorflow as tf

tf.config.threading.set_inter_op_parallelism_threads(1)
tf.config.threading.set_intra_op_parallelism_threads(1)
import horovod.tensorflow.mpi_ops as hvd

hvd.init()

def many(prefix, order):
    @tf.function
    def function(x):
        results = {i: hvd._allreduce(x + float(i), name=f"{prefix}{i}") for i in order}
        return tf.stack([results[i][0] for i in range(100)])
    return function

want = [2.0 + 2 * i for i in range(100)]
alike = many("alike", range(100))
for _ in range(5):
    assert alike(tf.ones(2)).numpy().tolist() == want
reversed_here = many("reversed", range(100)[::-1] if hvd.rank() else range(100))
for _ in range(5):
    assert reversed_here(tf.ones(2)).numpy().tolist() == want

# Two sets that have nothing in common, from two threads of the program: each rank starts another one first.
functions = [many("first", range(100)), many("second", range(100))]
for function in functions:
    function.get_concrete_function(tf.ones(2))
ended = []
def call(function):
    ended.append(function(tf.ones(2)).numpy().tolist() == want)
for _ in range(5):
    threads = [threading.Thread(target=call, args=(f,)) for f in functions]
    for thread in threads[:: -1 if hvd.rank() else 1]:
        thread.start()
    for thread in threads:
        thread.join()
assert ended == [True] * 10
print("ended", flush=True)
"""

REDUCE_FOR_EVER = """
import os, signal, sys
import tensorflow as tf
import horovod.tensorflow.mpi_ops as hvd

signal.signal(signal.SIGTERM, signal.SIG_IGN)
hvd.init()
rank = hvd.rank()
print(f"rank {rank} is process {os.getpid()}", flush=True)
reduce = tf.function(lambda x: hvd._allreduce(x, name="scope/gradient"))
try:
    step = 0
    while True:
        reduce(tf.ones(1000))
        step += 1
        if step == 10:
            print("reducing", flush=True)
except tf.errors.UnknownError as error:
    print(f"rank {rank} caught: {error.message.splitlines()[-1]} {error.message!r}", flush=True)
    try:
        hvd._allreduce(tf.ones(1))
    except tf.errors.UnknownError as again:
        print(f"rank {rank} again: {again.message!r}", flush=True)
    sys.exit(3)
"""

# The core is what the library looks for: it is not there when nobody imports horovod.
WITHOUT_CORE = """
import importlib.util, inspect
import tensorflow as tf

[folder] = importlib.util.find_spec("horovod").submodule_search_locations
library = tf.load_op_library(folder + "/tensorflow/libhorovod_tensorflow.so")
assert not hasattr(library, "horovod_allreduce")
print("problem:", inspect.signature(library.horovod_load_problem).parameters["text"].default)
try:
    import horovod.tensorflow.mpi_ops
except ImportError as error:
    print("ImportError:", error)
"""


def test_a_hundred_operations_with_one_thread(script, jobs) -> None:
    job = jobs(harness.python(2, script(ONE_THREAD), forked=True))
    job.wait_for("ended", count=2)
    job.succeed()


def test_a_killed_rank_raises_on_all_others_with_what_elastic_training_looks_for(
    script, jobs
) -> None:
    env = {"HOROVOD_HEARTBEAT_TIMEOUT_SECONDS": "0"}
    job = jobs(harness.python(3, script(REDUCE_FOR_EVER), env=env))
    lines = job.wait_for("is process", count=3)
    pids = {int(r): int(p) for r, p in re.findall(r"rank (\d) is process (\d+)", "\n".join(lines))}
    job.wait_for("reducing", count=3)

    os.kill(pids[1], signal.SIGKILL)
    caught = job.wait_for("caught:", count=2)
    again = job.wait_for("again:", count=2)
    job.fail()

    for line in caught + again:
        assert "[HorovodAllreduce]" in line
    for line in caught:
        assert re.search(r"rank 1\b", line.split("caught:")[1])


def test_a_library_without_the_core_says_so(script, jobs) -> None:
    job = jobs(harness.python(1, script(WITHOUT_CORE)))
    [problem] = job.wait_for("problem:")
    assert "horovod._core is not loaded" in problem
    [error] = job.wait_for("ImportError:")
    assert "does not work with TensorFlow 2." in error
    job.succeed()


def test_the_library_exports_nothing() -> None:
    words = ["nm", "-D", "--defined-only", str(LIBRARY)]
    exported = subprocess.run(
        words, check=True, capture_output=True, text=True, timeout=harness.LIMIT_S
    ).stdout
    assert exported == ""
    linked = subprocess.run(
        ["readelf", "-d", str(LIBRARY)],
        check=True,
        capture_output=True,
        text=True,
        timeout=harness.LIMIT_S,
    ).stdout
    needed = set(re.findall(r"NEEDED.*\[(.+)\]", linked))
    assert {Path(name).name.split(".")[0] for name in needed} <= {
        # Of the C library, which has them in one file or in several.
        *("libc", "libdl", "libm", "libpthread", "ld-linux-x86-64"),
        "libgcc_s",
    }
