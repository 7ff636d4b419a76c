"""The demo's driver says so, loudly, when the two runs do not match."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

RUN = Path(__file__).resolve().parents[2] / "examples" / "demo" / "run.py"


@pytest.fixture(scope="module")
def demo():
    spec = importlib.util.spec_from_file_location("demo_run", RUN)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(processes, losses, accuracy=0.98):
    return {
        "processes": processes,
        "losses": losses,
        "accuracy": accuracy,
        "samples_per_second": 1000.0,
    }


def test_equal_curves_pass(demo, capsys):
    status = demo.report([run(1, [2.0, 1.0]), run(2, [2.0, 1.00001])], Path("loss.png"))

    assert status == 0
    out = capsys.readouterr().out
    assert "equal within 0.0001 at each of 2 steps (largest difference 1.0e-05)" in out
    assert "1,000 samples per second" in out
    assert "98.00%" in out


@pytest.mark.parametrize(
    ("many", "text"),
    [
        (run(2, [2.0, 1.001]), "the losses differ by 1.0e-03 at step 2"),
        (run(2, [2.0]), "the runs took 2 and 1 steps"),
        (run(2, [2.0, 1.0], accuracy=0.96), "2 processes: test accuracy 96.00% is below 97%"),
        (run(2, [2.0, float("nan")]), "the losses differ by inf at step 2"),
    ],
)
def test_anything_else_fails(demo, capsys, many, text):
    status = demo.report([run(1, [2.0, 1.0]), many], Path("loss.png"))

    assert status == 1
    assert text in capsys.readouterr().err
