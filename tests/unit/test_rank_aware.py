"""Elastic states refuse objects that belong to one rank, and take those that only look like it."""

import argparse
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

from horovod.common.elastic import ObjectState

DATA = list(range(8))


def sampler():
    return DistributedSampler(DATA, num_replicas=2, rank=1)


class Derived(DistributedSampler):
    pass


def state(**values):
    return ObjectState(lambda value, root_rank: value, lambda: 0, **values)


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (
            sampler,
            r"state's it, a torch.utils.data.distributed.DistributedSampler, .*rank=1, num_replicas=2",
        ),
        (lambda: Derived(DATA, 2, 1), r"state's it, a .*Derived"),
        (lambda: [1, {"train": sampler()}], r"state's it\[1\]\['train'\], a"),
        (lambda: DataLoader(DATA, sampler=sampler()), r"state's it\.sampler, a"),
        (
            lambda: DataLoader(DATA, batch_sampler=BatchSampler(sampler(), 2, False)),
            r"state's it\.batch_sampler\.sampler, a",
        ),
        (lambda: argparse.Namespace(rank=0, world_size=2), r"state's it, a argparse.Namespace"),
        (lambda: {"rank": 0, "world_size": 2}, r"state's it, a builtins.dict"),
        (lambda: SimpleNamespace(process_index=0, num_processes=2), r"state's it, a"),
    ],
    ids=["sampler", "derived", "nested", "loader", "batches", "arguments", "dict", "shard"],
)
def test_what_belongs_to_a_rank_is_refused_by_name(make, where):
    with pytest.raises(ValueError, match=where):
        state(it=make())
    # Also if it comes later.
    later = state(it=None)
    later.it = make()
    with pytest.raises(ValueError, match=where):
        later.sync()


def test_other_objects_are_taken():
    cyclic: list[object] = []
    cyclic.append(cyclic)
    values = {
        "numbers": {"rank": 3, "epoch": 1},
        "lora": SimpleNamespace(rank=8, alpha=16),
        "array": np.zeros(3),
        "tensor": torch.zeros(3),
        "random": RandomSampler(DATA),
        "loader": DataLoader(DATA, shuffle=True),
        "cyclic": cyclic,
        "kind": DistributedSampler,
    }
    state(**values).sync()
