"""Hosts for the tests of one module: two, or as many as its `HOSTS` says."""

from __future__ import annotations

from collections.abc import Iterator

import network
import pytest


@pytest.fixture(scope="module")
def net(request: pytest.FixtureRequest) -> Iterator[network.Network]:
    if reason := network.why_not():
        pytest.skip(f"NOT RUN, tests across hosts: {reason}")
    made = network.Network(getattr(request.module, "HOSTS", 2))
    yield made
    made.down()
