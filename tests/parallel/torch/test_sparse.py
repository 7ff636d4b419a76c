"""Sums and averages of sparse tensors."""

import pytest
import torch

import horovod.torch as hvd


def sparse(rank, dtype=torch.float32, size=(6, 2)):
    """Rank r has rows 0 and r, row r twice."""
    indices = torch.tensor([[0, rank, rank]])
    values = torch.tensor([[1, 2], [10, 20], [100, 200]], dtype=torch.float64).to(dtype) * (
        rank + 1
    )
    return torch.sparse_coo_tensor(indices, values, size)


def dense_sum(dtype=torch.float32):
    return sum(sparse(rank, dtype).to_dense() for rank in range(hvd.size()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_entries_add_up(dtype):
    wait = hvd.sparse_allreduce_async(sparse(hvd.rank(), dtype), "sparse", hvd.Sum)
    assert callable(wait)
    assert not isinstance(wait, int)
    result = wait()
    assert result.layout is torch.sparse_coo
    assert result.dtype == dtype
    assert result.shape == (6, 2)
    assert hvd.size() == 1 or not result.is_coalesced()
    assert torch.equal(result.to_dense(), dense_sum(dtype))


def test_the_average_divides_by_the_members():
    result = hvd.sparse_allreduce_async(sparse(hvd.rank()), name="average", op=hvd.Average)()
    torch.testing.assert_close(result.to_dense(), dense_sum() / hvd.size())


def test_every_other_operator_is_refused():
    with pytest.raises(ValueError, match=r"op Max is not supported for sparse tensors"):
        hvd.sparse_allreduce_async(sparse(hvd.rank()), "other", hvd.Max)


def test_numbers_of_entries_may_differ_and_be_zero():
    none = torch.sparse_coo_tensor(torch.zeros(1, 0, dtype=torch.int64), torch.zeros(0, 2), (6, 2))
    mine = sparse(0) if hvd.rank() == hvd.size() - 1 else none
    result = hvd.sparse_allreduce_async(mine, "empty", hvd.Sum)()
    assert torch.equal(result.to_dense(), sparse(0).to_dense())


def test_several_sparse_dimensions_and_no_name():
    index = torch.tensor([[hvd.rank() % 2], [1]])
    mine = torch.sparse_coo_tensor(index, torch.ones(1), (2, 3))
    result = hvd.sparse_allreduce_async(mine, None, hvd.Sum)()
    want = torch.zeros(2, 3)
    for rank in range(hvd.size()):
        want[rank % 2, 1] += 1
    assert torch.equal(result.to_dense(), want)


def test_gradients_of_sparse_embeddings():
    embedding = torch.nn.Embedding(10, 4, sparse=True)
    embedding(torch.tensor([hvd.rank(), hvd.rank(), 9])).sum().backward()
    result = hvd.sparse_allreduce_async(embedding.weight.grad, "embedding", hvd.Average)()
    want = torch.zeros(10, 4)
    for rank in range(hvd.size()):
        want[rank] += 2
        want[9] += 1
    torch.testing.assert_close(result.to_dense(), want / hvd.size())


def test_results_are_where_their_operands_are():
    """Whatever device new tensors go to: GPU 0 for most scripts that say "cuda", whose operands may be on another."""
    operand = sparse(hvd.rank())
    weight = torch.nn.Parameter(torch.zeros(6, 2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("weight", weight)])
    with torch.device("meta"):
        result = hvd.sparse_allreduce_async(operand, "elsewhere", hvd.Sum)()
        if hvd.rank() == 0:  # the others have no gradient
            weight.grad = operand
        optimizer.step()
    assert torch.equal(result.to_dense(), dense_sum())
    assert torch.equal(weight, -sparse(0).to_dense() / hvd.size())


def test_dense_and_csr_tensors_are_refused():
    for wrong in (torch.ones(2, 2), torch.ones(2, 2).to_sparse_csr()):
        with pytest.raises(ValueError, match="not a sparse COO tensor"):
            hvd.sparse_allreduce_async(wrong, "dense", hvd.Sum)


def test_the_returned_function_is_no_handle():
    wait = hvd.sparse_allreduce_async(sparse(hvd.rank()), "handle", hvd.Sum)
    with pytest.raises(TypeError):
        hvd.poll(wait)
    with pytest.raises(TypeError, match="call it"):
        hvd.synchronize(wait)
    wait()


def test_several_may_be_in_flight():
    waits = [
        hvd.sparse_allreduce_async(sparse(hvd.rank()), f"flight.{i}", hvd.Sum) for i in range(5)
    ]
    for wait in reversed(waits):
        assert torch.equal(wait().to_dense(), dense_sum())
