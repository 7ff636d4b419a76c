"""The Lightning strategy under `horovodrun`: two ranks train as one process does with their joined batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import harness

pytest.importorskip("lightning")
WORKER = Path(__file__).with_name("lightning_worker.py")


def _results(jobs: Any, np: int, package: str) -> Any:
    job = jobs(harness.python(np, WORKER, package, forked=True)).succeed()
    (line,) = [line for line in job.stdout.splitlines() if "RESULT " in line]
    return json.loads(line.partition("RESULT ")[2])


def test_two_ranks_train_as_one(jobs: Any) -> None:
    alone, both = (_results(jobs, np, "lightning.pytorch") for np in (1, 2))
    assert alone.keys() == both.keys() == {"clipped", "accumulated", "manual"}
    for kind, expected in alone.items():
        found = both[kind]
        assert found["steps"] == expected["steps"], kind
        assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-4), kind
        for name, values in expected["weights"].items():
            for got, want in zip(_flat(found["weights"][name]), _flat(values), strict=True):
                assert got == pytest.approx(want, abs=1e-5), (kind, name)
        # Without a gradient it is not moved, by weight decay neither.
        assert found["weights"]["unused"] == [1.0, 1.0, 1.0]
    assert alone["clipped"]["weights"]["net.0.weight"] != alone["manual"]["weights"]["net.0.weight"]


def _flat(values: Any) -> list[float]:
    return [v for part in values for v in _flat(part)] if isinstance(values, list) else [values]
