"""Which gradients may be reduced in place: those on memory that nothing else owns."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from horovod.torch import _memory_owners as owners  # noqa: E402


def test_memory_of_numpy_counts_as_shared_at_each_place_of_a_batch() -> None:
    foreign = torch.from_numpy(np.ones(4))
    own = torch.ones(4)
    assert owners.are_alone([own, torch.ones(4)])
    assert not owners.are_alone([own, foreign])
    assert not owners.are_alone([foreign, own])
    # The last tensor's memory has a further owner, which is the one that is passed along.
    passed = torch.ones(4)
    last = passed.view(2, 2)
    assert owners.are_alone([own, last], passed)
    assert not owners.are_alone([foreign, last], passed)
