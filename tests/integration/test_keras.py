"""A rank that dies in the middle of `model.fit`, on each backend: the others raise; elastic training goes on."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

import harness

WORKER = Path(__file__).with_name("keras_worker.py")
BACKENDS = ["torch", "tensorflow", "jax"]


def on(usual, test):
    """Each backend; all but the usual one in the second tier: what they share is in `horovod._keras`."""
    others = [b for b in BACKENDS if b != usual]
    thorough = pytest.mark.thorough(also=f"tests/integration/test_keras.py::{test}")
    return pytest.mark.parametrize(
        "backend", [usual, *(pytest.param(b, marks=thorough) for b in others)]
    )


def start(jobs, mode, folder, backend, *options):
    folder.mkdir(exist_ok=True)
    env = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    env |= {"HOROVOD_ELASTIC_SLOT_FAILURES": "100"}
    return jobs(harness.python(3, WORKER, mode, str(folder), options=options, env=env))


@on("tensorflow", "test_a_killed_rank_makes_fit_raise_on_all_others")
def test_a_killed_rank_makes_fit_raise_on_all_others(jobs, tmp_path, backend) -> None:
    (tmp_path / "kill").touch()
    job = start(jobs, "fit", tmp_path, backend)
    caught = job.wait_for(" caught ", count=2)
    code = job.fail()

    assert code == 128 + signal.SIGKILL
    assert {re.search(r"rank (\d) caught", line)[1] for line in caught} == {"0", "1"}
    text = job.stdout
    assert (
        len(re.findall(r"lost a member of the job: rank 2 on \S+: killed by signal 9", text)) >= 2
    )


@on("jax", "test_elastic_training_ends_with_the_weights_of_an_undisturbed_run")
def test_elastic_training_ends_with_the_weights_of_an_undisturbed_run(
    jobs, tmp_path, backend
) -> None:
    """A replacement takes the lost rank's place; with the same data at each step all bits are the same."""
    elastic = ("--min-np", "3", "-H", "localhost:3")
    undisturbed = start(jobs, "elastic", tmp_path / "undisturbed", backend, *elastic).succeed()
    folder = tmp_path / "disturbed"
    folder.mkdir()
    (folder / "kill").touch()
    disturbed = start(jobs, "elastic", folder, backend, *elastic).succeed()

    assert not (folder / "kill").exists()
    assert "killed by signal 9" in disturbed.stderr
    # The others had just committed the step after which the rank died.
    assert len(re.findall(r"goes on from step 10\b", disturbed.stdout)) == 3, disturbed.report()
    results = set(re.findall(r"result (\d+ \d+ \w+)", disturbed.stdout))
    assert results == set(re.findall(r"result (\d+ \d+ \w+)", undisturbed.stdout))
    assert len(results) == 1, disturbed.report()
    assert results.pop().startswith("3 0 ")
    assert disturbed.stdout.count("done after 18 steps") == 3


# Rank 1 has no more data; rank 0 waits for it inside of `fit`.
UNEVEN = """
import threading
import keras, numpy as np
import horovod.keras as hvd

hvd.init()
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
rows = 8 if hvd.rank() == 0 else 4
model.fit(np.ones((rows, 4)), np.ones((rows, 2)), batch_size=2, verbose=0)  # here
threading.Event().wait()
"""


@on("torch", "test_the_stall_report_names_the_line_that_is_inside_of_fit")
def test_the_stall_report_names_the_line_that_is_inside_of_fit(script, jobs, backend) -> None:
    path = script(UNEVEN)
    line = 1 + next(i for i, text in enumerate(UNEVEN.splitlines()) if "# here" in text)
    env = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    env |= {"HOROVOD_STALL_CHECK_TIME_SECONDS": "2"}
    job = jobs(harness.python(2, path, env=env))
    job.wait_for(f"{path}:{line} in <module>")
    # The other one is where it waits for something else.
    job.wait_for(f"{path}:{line + 1} in <module>")


EXAMPLES = harness.ROOT / "examples"


@pytest.mark.parametrize(("np", "backend"), [(1, "tensorflow"), (2, "jax"), (3, "torch")])
def test_the_example_on_each_backend(jobs, tmp_path, np, backend) -> None:
    env = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    words = ("--epochs", "4", "--checkpoint-dir", str(tmp_path))
    script = EXAMPLES / "keras/keras_digits.py"
    job = jobs(harness.python(np, script, *words, env=env, forked=True)).succeed()
    accuracy = re.search(rf"{backend}: test loss [\d.]+, accuracy ([\d.]+) %", job.stdout)
    assert float(accuracy[1]) > 85, job.report()
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("legacy", ["0", "1"], ids=["Keras 3", "Keras 2"])
def test_the_usual_script_of_tf_keras(jobs, legacy) -> None:
    env = {"TF_USE_LEGACY_KERAS": legacy, "TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": None}
    script = EXAMPLES / "tensorflow2/tensorflow2_keras_digits.py"
    words = ("--epochs", "2", "--steps", "100")
    job = jobs(harness.python(2, script, *words, env=env)).succeed()
    assert float(re.search(r"accuracy ([\d.]+) %", job.stdout)[1]) > 30, job.report()


def test_the_elastic_example(jobs) -> None:
    script = EXAMPLES / "elastic/keras/keras_digits_elastic.py"
    env = {"KERAS_BACKEND": "torch"}
    options = ["--min-np", "1"]
    job = jobs(harness.python(2, script, "--epochs", "3", options=options, env=env)).succeed()
    assert "3 epochs are done" in job.stdout, job.report()
