"""The example of `horovod-candle` under `horovodrun`: it learns alike on any number of ranks."""

from __future__ import annotations

import pytest

import rust_examples

# The same front end and engine; candle itself takes too long to build for the first tier.
pytestmark = pytest.mark.thorough(
    also="tests/integration/test_rust.py::test_an_example_learns_the_same_on_one_two_and_three_ranks"
)


def test_the_network_learns_the_same_on_one_two_and_three_ranks(jobs) -> None:
    cnn = rust_examples.build_apart("candle") / "cnn"
    rust_examples.check_that_it_learns_alike(cnn, jobs, loss_rel=1e-3, accuracy_abs=0.01)
