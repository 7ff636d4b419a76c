"""Arguments that are no integers are not cut off, and sparse reductions agree with dense ones."""

import numpy as np
import pytest
import torch

import horovod.torch as hvd


@pytest.mark.parametrize("count", [0.5, 1.0, np.float32(1), "1", None, [1]])
def test_splits_are_integers(count):
    with pytest.raises(ValueError, match="1D list of integers as splits"):
        hvd.alltoall(torch.zeros(2 * hvd.size()), splits=[count] * hvd.size())


@pytest.mark.parametrize("kind", [dict.fromkeys, set, frozenset])
def test_what_has_no_order_is_no_splits(kind):
    splits = kind(range(hvd.size()))
    with pytest.raises(ValueError, match="1D list of integers as splits"):
        hvd.alltoall(torch.zeros(hvd.size() ** 2), splits)


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_integers_of_all_kinds_are_splits(kind):
    received, counts = hvd.alltoall(torch.ones(hvd.size()), splits=kind([1] * hvd.size()))
    assert received.tolist() == counts.tolist() == [1] * hvd.size()


DTYPES = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]
DTYPES += [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]


@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sign", [1, -1])
def test_sparse_and_dense_agree(dtype, op, sign):
    if dtype == torch.uint8 and sign < 0:
        sign = 2
    # Row 0 is on all ranks, twice on each; row 1 on one rank only.
    rows = [0, 0, *([1] if hvd.rank() == 0 else []), 2 + hvd.rank()]
    values = torch.arange(1, len(rows) + 1).mul(3 * sign).to(dtype)
    mine = torch.sparse_coo_tensor(torch.tensor([rows]), values, (2 + hvd.size(),))
    dense = hvd.allreduce(mine.to_dense(), op=op)
    sparse = hvd.sparse_allreduce_async(mine, "agree", op)().to_dense()
    if dtype.is_floating_point or dtype.is_complex:
        torch.testing.assert_close(sparse, dense)
    else:
        assert torch.equal(sparse, dense)


def test_what_dense_tensors_refuse_sparse_ones_refuse():
    mine = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.tensor([True]), (2,))
    for op, value in [(hvd.Average, mine), (hvd.Min, mine.float()), (hvd.Adasum, mine.float())]:
        with pytest.raises(ValueError, match="is not supported for"):
            hvd.sparse_allreduce_async(value, "refused", op)
