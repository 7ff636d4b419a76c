"""Allgather, broadcast, alltoall and reducescatter of what only PyTorch has. For the rest see tests/conformance."""

import pytest
import torch
from ops_support import check, sample

import horovod.torch as hvd


def test_results_own_their_memory():
    # The core's memory is reused; not while a tensor looks at it.
    first = hvd.allgather(torch.full((1000,), 1.0))
    for _ in range(20):
        hvd.allgather(torch.full((1000,), 2.0))
    assert first.eq(1.0).all()
    first += 1
    assert first.eq(2.0).all()


def test_allgather_of_expanded_rows():
    check(hvd.allgather(torch.ones(1, 3).expand(2, 3)), torch.ones(2 * hvd.size(), 3))


def test_the_result_of_a_broadcast_is_a_copy_on_the_root_too():
    tensor = torch.ones(3)
    result = hvd.broadcast(tensor, 0)
    result.zero_()
    assert tensor.eq(1).all()
    column = torch.ones(3, 2)[:, 0]
    hvd.broadcast(column, 0).zero_()
    assert column.eq(1).all()


def test_a_channels_last_model_may_be_broadcast_from_a_contiguous_one():
    mine = sample(hvd.rank(), (2, 3, 4, 4), torch.float32)
    if hvd.rank():
        mine = mine.contiguous(memory_format=torch.channels_last)
    hvd.broadcast_(mine, 0)
    check(mine, sample(0, (2, 3, 4, 4), torch.float32))
    assert mine.is_contiguous(memory_format=torch.channels_last) or not hvd.rank()


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        (lambda n: torch.zeros(n, 1, dtype=torch.int32), "expects a 1D splits tensor"),
        (lambda n: torch.zeros(n), "32-bit integer elements"),
    ],
)
def test_wrong_tensors_of_splits_are_refused_before_anything_is_sent(splits, message):
    with pytest.raises(ValueError, match=message):
        hvd.alltoall(torch.zeros(3, 2), splits=splits(hvd.size()))
    check(hvd.alltoall(torch.ones(hvd.size())), torch.ones(hvd.size()))


def test_reducescatter_compresses():
    got = hvd.reducescatter(torch.ones(hvd.size()), compression=hvd.Compression.fp16, op=hvd.Sum)
    check(got, torch.full((1,), float(hvd.size())))
