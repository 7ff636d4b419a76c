"""Models that were trained here predict the same where horovod is not installed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import harness

HERE = Path(__file__).parent
KINDS = {"torch": 3, "keras": 2, "saved_model": 1, "frozen": 1}


def predicted(job: harness.Job) -> list[list[list[float]]]:
    lines = job.succeed().stdout.splitlines()
    return [json.loads(line.partition("predicted:")[2]) for line in lines if "predicted:" in line]


@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_model_loads_without_horovod(kind: str, tmp_path: Path) -> None:
    with harness.python(1, HERE / "inference_training.py", kind, str(tmp_path)) as training:
        (there,) = predicted(training)
    command = [sys.executable, HERE / "inference_loading.py", kind, str(tmp_path)]
    with harness.Job(command) as loading:
        here = predicted(loading)
    assert len(here) == KINDS[kind]
    for one in here:
        assert one == [pytest.approx(row, rel=1e-5, abs=1e-6) for row in there]
