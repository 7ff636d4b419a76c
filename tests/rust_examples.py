"""Examples in Rust: building those of the crates for frameworks, and the checks of what they print."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import harness

_WEIGHTS = re.compile(r"rank \d ended with (\[.*\])")
_RESULT = re.compile(r"loss ([0-9.]+) accuracy ([0-9.]+) replicas equal: (true|false)")

# A build from nothing on a loaded machine: the frameworks are large.
_BUILD_LIMIT_S = 3000.0


def build_apart(framework: str) -> Path:
    """Build the examples of a crate that is a workspace of its own; their folder."""
    target = Path(os.environ.get("CARGO_TARGET_DIR", harness.ROOT / "target")) / framework
    words = ["cargo", "build", "--locked", "--quiet", "--examples", "--all-features"]
    words += ["--manifest-path", f"crates/horovod-{framework}/Cargo.toml"]
    words += ["--target-dir", str(target)]
    built = subprocess.run(
        words, cwd=harness.ROOT, capture_output=True, text=True, timeout=_BUILD_LIMIT_S, check=False
    )
    assert built.returncode == 0, built.stderr
    return target / "debug" / "examples"


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


def check_that_it_survives_a_kill(
    program: Path, jobs: Callable[[harness.Job], harness.Job], folder: Path
) -> None:
    """Run it alone, then on two ranks of which one is killed: the weights at the end are the same, bit for bit."""
    done = subprocess.run([program], capture_output=True, text=True, timeout=200.0, check=True)
    [undisturbed] = _WEIGHTS.findall(done.stdout)

    # Slots that fail often would rest for a minute.
    env = {"HOROVOD_ELASTIC_SLOT_FAILURES": "100"}
    options = ("--min-np", "1", "--host-discovery-script", "echo localhost:2")
    job = jobs(harness.horovodrun(2, [program, folder], *options, env=env))
    job.succeed()

    assert "was killed by signal 9" in job.stderr
    assert set(_WEIGHTS.findall(job.stdout)) == {undisturbed}
    generations = re.findall(r"generation of (\d): rank \d from step (\d+)", job.stdout)
    assert generations[:2] == [("2", "0")] * 2
    # Step 4 is the last commit before the kill. The survivor may have trained alone before its new peer came.
    assert {("2", "4"), ("1", "4")} & set(generations)
