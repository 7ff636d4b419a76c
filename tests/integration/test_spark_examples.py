"""The examples on Spark run as their users run them, each with a Spark of its own."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import harness

pytest.importorskip("pyspark")
if shutil.which("java") is None:
    pytest.skip("there is no Java, which Spark needs", allow_module_level=True)

FIT = "test_fit_transform_save_load_and_resume"


def also(test: str) -> pytest.MarkDecorator:
    return pytest.mark.thorough(also=f"tests/integration/{test}")


def run(script: str, words: list[str], jobs: Any, folder: Path) -> str:
    path = harness.ROOT / "examples" / "spark" / script
    job = harness.Job([sys.executable, path, *words], cwd=folder)
    return str(jobs(job).succeed().stdout)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("spark_run.py", []),
        ("horovod_runner.py", ["--np", "2"]),
        pytest.param(
            "horovod_runner.py", ["--np", "-2"], marks=also("test_spark.py::test_horovod_runner")
        ),
        ("estimator_torch.py", ["--epochs", "6"]),
        pytest.param("estimator_keras.py", [], marks=also(f"test_spark_keras_estimator.py::{FIT}")),
        pytest.param(
            "estimator_lightning.py", [], marks=also(f"test_spark_lightning_estimator.py::{FIT}")
        ),
    ],
)
def test_digits_are_learned(script: str, words: list[str], jobs: Any, tmp_path: Path) -> None:
    out = run(script, words, jobs, tmp_path)
    accuracies = re.findall(r"accuracy.*?([\d.]+)%", out, re.IGNORECASE)
    assert accuracies, out
    assert float(accuracies[-1]) > 85


@also("test_spark.py::test_an_elastic_job_goes_on_with_the_task_that_spark_starts_again")
def test_training_goes_on_when_an_executor_is_killed(jobs: Any, tmp_path: Path) -> None:
    out = run("spark_elastic.py", ["--num-proc", "2"], jobs, tmp_path)
    # Two ranks, after the loss one, and two again.
    assert re.findall(r"epochs on (\d) ranks", out) == ["2", "1", "2"], out
    accuracy = re.search(r"accuracy ([\d.]+)% on 2 ranks", out)
    assert accuracy, out
    assert float(accuracy[1]) > 85
