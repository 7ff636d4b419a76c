"""The example of `horovod-candle` under `horovodrun`: it learns alike on any number of ranks."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import harness
import rust_examples

# A build from nothing on a loaded machine: candle is large.
BUILD_LIMIT_S = 3000.0

# The same front end and engine; candle itself takes too long to build for the first tier.
pytestmark = pytest.mark.thorough(
    also="tests/integration/test_rust.py::test_an_example_learns_the_same_on_one_two_and_three_ranks"
)


@pytest.fixture(scope="module")
def cnn() -> Path:
    """The built example."""
    target = Path(os.environ.get("CARGO_TARGET_DIR", harness.ROOT / "target")) / "candle"
    words = ["cargo", "build", "--locked", "--quiet", "--example", "cnn"]
    words += ["--manifest-path", "crates/horovod-candle/Cargo.toml", "--target-dir", str(target)]
    built = subprocess.run(
        words, cwd=harness.ROOT, capture_output=True, text=True, timeout=BUILD_LIMIT_S, check=False
    )
    assert built.returncode == 0, built.stderr
    return target / "debug" / "examples" / "cnn"


def test_the_network_learns_the_same_on_one_two_and_three_ranks(cnn, jobs) -> None:
    rust_examples.check_that_it_learns_alike(cnn, jobs, loss_rel=1e-3, accuracy_abs=0.01)
