"""The examples with TensorFlow run as their users run them; the usual script on 1, 2 and 3 processes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import harness

EXAMPLES = harness.ROOT / "examples"
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}


def rest(test: str) -> pytest.MarkDecorator:
    """Numbers of ranks on which the same lines run as on those of the first tier."""
    return pytest.mark.thorough(also=f"tests/integration/test_tf_examples.py::{test}")


USUAL, OLD = rest("test_the_usual_script"), rest("test_the_script_of_tensorflow_1")


@pytest.mark.parametrize("np", [pytest.param(1, marks=USUAL), 2, pytest.param(3, marks=USUAL)])
def test_the_usual_script(np: int, jobs, tmp_path: Path) -> None:
    mnist = EXAMPLES / "tensorflow2" / "tensorflow2_mnist.py"
    job = jobs(harness.python(np, mnist, "--data-dir", str(tmp_path), env=QUIET)).succeed()
    (accuracy,) = re.findall(r"Test accuracy: ([\d.]+)%", job.stdout)
    assert float(accuracy) > 90, job.report()
    assert list(tmp_path.iterdir()), "rank 0 wrote no checkpoint"


@pytest.mark.parametrize("np", [pytest.param(1, marks=OLD), 2, pytest.param(3, marks=OLD)])
def test_the_script_of_tensorflow_1(np: int, jobs, tmp_path: Path) -> None:
    mnist = EXAMPLES / "tensorflow" / "tensorflow_mnist.py"
    words = ("--data-dir", str(tmp_path))
    job = jobs(harness.python(np, mnist, *words, env=QUIET, forked=True)).succeed()
    (accuracy,) = re.findall(r"Accuracy in the last batch: ([\d.]+)%", job.stdout)
    assert float(accuracy) > 90, job.report()
    assert list(tmp_path.iterdir()), "rank 0 wrote no checkpoint"


@pytest.mark.parametrize(
    "words",
    [
        ["tensorflow/tensorflow_mnist.py", "--steps", "20", "--use-adasum"],
        ["tensorflow/tensorflow_mnist.py", "--steps", "20", "--gradient-predivide-factor", "2.0"],
        ["tensorflow2/tensorflow2_mnist.py", "--steps", "20", "--fp16-allreduce"],
        ["elastic/tensorflow2/tensorflow2_mnist_elastic.py", "--steps", "40"],
    ],
    ids=lambda words: " ".join(words[::3]),
)
def test_example_runs(words: list[str], jobs) -> None:
    jobs(harness.python(2, EXAMPLES / words[0], *words[1:], env=QUIET, forked=True)).succeed()
