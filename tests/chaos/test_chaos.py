"""A representative part of the chaos suite: every fault and every phase; `make chaos` runs all of it, `make soak` half
an hour of what is half a minute here."""

from __future__ import annotations

from collections.abc import Iterator

import cells
import faults
import ground
import plan
import pytest
import soak


@pytest.fixture(scope="module")
def between() -> Iterator[ground.Ground]:
    made = ground.Ground()
    yield made
    made.close()


@pytest.mark.parametrize("cell", plan.chosen(), ids=lambda cell: cell.name)
def test_promise_is_kept(cell, request, tmp_path) -> None:
    fault = faults.of(cell)
    if reason := faults.why_not(fault):
        pytest.skip(f"NOT RUN, {cell.name}: {reason}")
    hosts = request.getfixturevalue("between") if fault.between_hosts else None
    run = cells.Run(cell, tmp_path, hosts)
    try:
        run.check()
    finally:
        run.close()


def test_half_a_minute_of_random_faults(tmp_path) -> None:
    # A loaded machine is no further fault: none of these stops a rank for so long.
    words = ["--minutes", "0.5", "--every", "1.5", "--heartbeat", "30"]
    args = soak.parser().parse_args(words)
    figures = soak.soak(args, tmp_path)
    print(figures)
    assert figures["faults that ended a round"], figures
    assert not figures["wrong"], figures


def test_every_fault_and_every_phase_are_among_the_chosen_cells() -> None:
    chosen = plan.chosen()
    assert {cell.fault for cell in chosen} >= set(faults.FAULTS)
    assert {cell.phase for cell in chosen} >= set(plan.PHASES)
