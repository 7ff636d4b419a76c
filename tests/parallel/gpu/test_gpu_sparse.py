"""Sparse tensors and gradients on GPUs: their entries stay there, and nobody waits for their number."""

import contextlib

import pytest
import torch
from devices import GpuTensor, module_on_gpu, number_of_gpus, on_gpu, without_waiting

import horovod.torch as hvd

hvd.init()
SIZE, RANK = hvd.size(), hvd.rank()
DEVICE = hvd.local_rank() % number_of_gpus()


def rows_of(rank, dtype=torch.float32):
    """Rank r has rows 0 and r, row r twice."""
    values = torch.tensor([[1, 2], [10, 20], [100, 200]], dtype=torch.float64).to(dtype)
    return torch.sparse_coo_tensor(
        torch.tensor([[0, rank, rank]]), values * (rank + 1), (SIZE + 3, 2)
    )


def everyones(dtype=torch.float32):
    return sum(rows_of(rank, dtype).to_dense() for rank in range(SIZE))


def is_there(result):
    assert isinstance(result, GpuTensor)
    assert result.layout is torch.sparse_coo
    for part in (result, result._indices(), result._values()):
        assert part.device == torch.device("cuda", DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average], ids=["sum", "average"])
@pytest.mark.parametrize("coalesced", [False, True])
def test_entries_add_up(dtype, op, coalesced):
    mine = rows_of(RANK, dtype)
    mine = on_gpu(mine.coalesce() if coalesced else mine, DEVICE)
    # Sums of integers at one place are divided, so these entries are found first, and counted on the host.
    is_rounded = op == hvd.Average and not dtype.is_floating_point
    with contextlib.nullcontext() if is_rounded else without_waiting():
        result = hvd.sparse_allreduce_async(mine, "sparse", op)()
    is_there(result)
    assert result.dtype == dtype
    want = everyones(torch.float64)
    if op == hvd.Average:
        want = want / SIZE
    if is_rounded:
        want = want.trunc()
    torch.testing.assert_close(result.to_dense().cpu().double(), want, rtol=2e-2, atol=0)


def test_numbers_of_entries_may_differ_and_be_zero():
    none = torch.sparse_coo_tensor(torch.zeros(1, 0, dtype=torch.int64), torch.zeros(0, 2), (5, 2))
    one = torch.sparse_coo_tensor(torch.tensor([[3]]), torch.ones(1, 2), (5, 2))
    mine = on_gpu(one if RANK == SIZE - 1 else none, DEVICE)
    with without_waiting():
        result = hvd.sparse_allreduce_async(mine, "some", hvd.Sum)()
    is_there(result)
    assert torch.equal(result.to_dense().cpu(), one.to_dense())
    nothing = hvd.sparse_allreduce_async(on_gpu(none, DEVICE), "none", hvd.Sum)()
    assert torch.equal(nothing.to_dense().cpu(), none.to_dense())


def test_a_dense_function_refuses_them():
    mine = on_gpu(rows_of(RANK), DEVICE)
    for call in (hvd.allreduce, hvd.allgather, lambda t: hvd.broadcast(t, 0), hvd.alltoall):
        with pytest.raises(ValueError, match="see sparse_allreduce_async"):
            call(mine)


def model():
    torch.manual_seed(7)
    return torch.nn.ModuleDict(
        {
            "words": torch.nn.Embedding(8, 3, sparse=True),
            "rare": torch.nn.Embedding(4, 3, sparse=True),
            "out": torch.nn.Linear(3, 1),
        }
    ).double()


def loss_of(net, words, rare):
    found = net["words"](words).sum(1)
    if rare is not None:
        found = found + net["rare"](rare)
    return net["out"](torch.tanh(found)).square().mean()


def words_of(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(8, (4, 3), generator=generator)


@pytest.mark.parametrize(
    ("options", "waits"),
    [
        ({}, []),
        ({"backward_passes_per_step": 2}, []),
        # A gradient that was made dense is made sparse again: PyTorch counts the elements that are not zero.
        ({"sparse_as_dense": True}, ["to_sparse", "to_sparse"]),
        ({"sparse_as_dense": True, "groups": 1}, ["to_sparse", "to_sparse"]),
    ],
    ids=["sparse", "two passes", "as dense", "as dense, grouped"],
)
@pytest.mark.parametrize("everybody", [True, False], ids=["all ranks", "some ranks"])
def test_gradients_of_embeddings(options, waits, everybody):
    """Also of one that only rank 0 uses: on the others nothing stands for it."""
    net, reference = module_on_gpu(model(), DEVICE), model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.5),
        named_parameters=net.named_parameters(),
        **options,
    )
    passes = options.get("backward_passes_per_step", 1)
    alone = torch.optim.SGD(reference.parameters(), lr=0.5)
    for step in range(3):
        words = [words_of(rank, step) for rank in range(SIZE)]
        rares = [w[:, 0] % 4 if everybody or rank == 0 else None for rank, w in enumerate(words)]
        mine, rare = on_gpu(words[RANK], DEVICE), rares[RANK]
        rare = None if rare is None else on_gpu(rare, DEVICE)
        with without_waiting(*(waits if SIZE > 1 else [])):
            optimizer.zero_grad()
            for _ in range(passes):
                loss_of(net, mine, rare).backward()
            optimizer.step()
        alone.zero_grad()
        for w, r in zip(words, rares, strict=True):
            (loss_of(reference, w, r) * passes / SIZE).backward()
        alone.step()
    for got, want in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(got.detach().cpu(), want.detach(), rtol=1e-10, atol=1e-12)
