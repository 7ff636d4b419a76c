"""A representative part of the chaos suite: every fault and every phase; `make chaos` runs all of it."""

from __future__ import annotations

import cells
import faults
import plan
import pytest


@pytest.mark.parametrize("cell", plan.chosen(), ids=lambda cell: cell.name)
def test_promise_is_kept(cell, jobs, tmp_path) -> None:
    if reason := faults.why_not(faults.FAULTS[cell.fault]):
        pytest.skip(f"NOT RUN, {cell.name}: {reason}")
    run = cells.Run(cell, tmp_path)
    jobs(run.job)
    try:
        run.check()
    finally:
        run.close()
