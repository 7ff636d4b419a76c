"""Examples in Rust: building those of the crates for frameworks, and the check that they learn alike."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import harness

_RESULT = re.compile(r"loss ([0-9.]+) accuracy ([0-9.]+) replicas equal: (true|false)")

# A build from nothing on a loaded machine: the frameworks are large.
_BUILD_LIMIT_S = 3000.0


def build_apart(framework: str) -> Path:
    """Build the examples of a crate that is a workspace of its own; their folder."""
    target = Path(os.environ.get("CARGO_TARGET_DIR", harness.ROOT / "target")) / framework
    words = ["cargo", "build", "--locked", "--quiet", "--examples"]
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
