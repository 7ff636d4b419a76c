"""Elastic states refuse objects that belong to one rank, and take those that only look like it."""

import argparse
from collections import deque, namedtuple
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    TensorDataset,
)

from horovod.common.elastic import ObjectState

DATA = list(range(8))


def sampler():
    return DistributedSampler(DATA, num_replicas=2, rank=1)


class Derived(DistributedSampler):
    pass


class Slots:
    __slots__ = ("num_replicas", "rank")

    def __init__(self):
        self.rank, self.num_replicas = 1, 2


class Own(Sampler):
    def __init__(self):
        self.rank, self.seed = 1, 7


class LowRank(TensorDataset):
    def __init__(self):
        super().__init__(torch.zeros(3))
        self.rank = 3


Place = namedtuple("Place", "rank world_size")


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
        (lambda: SimpleNamespace(_rank=1, _num_replicas=2), r"_rank=1, _num_replicas=2"),
        (lambda: SimpleNamespace(rank=np.int64(1), world_size=torch.tensor(2)), r"rank=1, world"),
        (lambda: SimpleNamespace(worker_id=0, num_workers=2), r"worker_id=0, num_workers=2"),
        (lambda: SimpleNamespace(dp_rank=0, dp_size=2), r"dp_rank=0, dp_size=2"),
        (Slots, r"a .*Slots, .*rank=1, num_replicas=2"),
        (lambda: Place(0, 2), r"a .*Place, .*rank=0, world_size=2"),
        (lambda: deque([sampler()]), r"it\[0\], a"),
        (lambda: {sampler()}, r"it\[0\], a"),
        (lambda: partial(print, rank=0, world_size=2), r"it\.keywords, a"),
        (Own, r"a .*Own, belongs to one rank \(rank=1\)"),
        (lambda: DataLoader(DATA, sampler=Own()), r"state's it\.sampler, a"),
    ],
    ids=[
        *("sampler", "derived", "nested", "loader", "batches", "arguments", "dict", "shard"),
        *("private", "numbers", "worker", "data_parallel", "slots", "named"),
        *("deque", "set", "partial", "own", "own_loader"),
    ],
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
        "data": LowRank(),
        "image": {"rank": 2, "size": 10},
        "share": SimpleNamespace(index=3, size=8),
        "cursor": SimpleNamespace(index=17, num_shards=64),
        "next": {"shard": 3, "num_shards": 128},
        "flag": SimpleNamespace(rank=True, world_size=2),
    }
    state(**values).sync()
