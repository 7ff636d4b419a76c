"""The check of examples in Rust that learn: alike on any number of ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import harness

_RESULT = re.compile(r"loss ([0-9.]+) accuracy ([0-9.]+) replicas equal: (true|false)")


def check_that_it_learns_alike(
    program: Path,
    jobs: Callable[[harness.Job], harness.Job],
    *,
    loss_rel: float,
    accuracy_abs: float,
) -> None:
    """Run it on 1, 2 and 3 ranks. The batch over all ranks is the same; only the order of its sums differs."""
    results = []
    for ranks in (1, 2, 3):
        job = jobs(harness.horovodrun(ranks, [program]))
        job.succeed()
        [(loss, accuracy, equal)] = _RESULT.findall(job.stdout)
        assert equal == "true"
        results.append((float(loss), float(accuracy)))
    for loss, accuracy in results:
        assert loss == pytest.approx(results[0][0], rel=loss_rel)
        assert accuracy == pytest.approx(results[0][1], abs=accuracy_abs)
        assert accuracy > 0.85
