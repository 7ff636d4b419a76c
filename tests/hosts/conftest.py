"""Two hosts for the tests of one module."""

from __future__ import annotations

from collections.abc import Iterator

import network
import pytest


@pytest.fixture(scope="module")
def net() -> Iterator[network.Network]:
    if reason := network.why_not():
        pytest.skip(f"NOT RUN, tests across hosts: {reason}")
    made = network.Network(2)
    yield made
    made.down()
