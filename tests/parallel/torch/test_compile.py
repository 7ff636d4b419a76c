"""Operations and SyncBatchNorm inside functions and models that `torch.compile` captures."""

import pytest
import torch
from ops_support import still_works

import horovod.torch as hvd

# The whole capture and its breaks, without a C++ compiler, which a user's machine may lack.
BACKEND = "aot_eager"


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    still_works()


def test_every_operation_inside_a_compiled_function():
    size = hvd.size()

    @torch.compile(backend=BACKEND)
    def step(x, batch):
        y = x * 2
        total = hvd.allreduce(y, name=f"compiled.{batch}", op=hvd.Sum)
        handle = hvd.allreduce_async_(y.clone(), op=hvd.Sum)
        again = hvd.synchronize(handle)
        a, b = hvd.grouped_allreduce([x, y], op=hvd.Sum)
        gathered = hvd.allgather(x)
        shared = hvd.broadcast(x, 0)
        exchanged = hvd.alltoall(x)
        share = hvd.reducescatter(x, op=hvd.Sum)
        return total + again + a + b, gathered + 1, shared * exchanged, share * 2

    x = torch.ones(size)
    for batch in range(4):
        sums, gathered, products, share = step(x, batch)
        assert sums.eq(7 * size).all()
        assert gathered.shape == (size * size,)
        assert gathered.eq(2).all()
        assert products.eq(1).all()
        assert share.eq(2 * size).all()


def test_gradients_through_a_compiled_function():
    @torch.compile(backend=BACKEND)
    def loss(x):
        return (hvd.allreduce(x * 3, op=hvd.Sum) ** 2).sum()

    x = torch.full((3,), 2.0, requires_grad=True)
    for _ in range(2):
        x.grad = None
        loss(x).backward()
        n = hvd.size()
        assert x.grad.eq(2 * (6.0 * n) * 3 * n).all()


def test_a_compiled_model_with_synchronised_normalisation():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), hvd.SyncBatchNorm(6), torch.nn.ReLU())
    plain = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.ReLU())
    plain.load_state_dict(model.state_dict())
    compiled = torch.compile(model, backend=BACKEND)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        whole = torch.randn(5 * hvd.size(), 4, generator=generator)
        mine = slice(5 * hvd.rank(), 5 * hvd.rank() + 5)
        got = compiled(whole[mine])
        torch.testing.assert_close(got, plain(whole)[mine], rtol=1e-5, atol=1e-5)
        got.sum().backward()


def test_a_compiled_model_trains_like_an_ordinary_one():
    def train(compile_it):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
        )
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        forward = torch.compile(model, backend=BACKEND) if compile_it else model
        generator = torch.Generator().manual_seed(hvd.rank())
        for _ in range(4):
            optimizer.zero_grad()
            forward(torch.randn(5, 4, generator=generator)).pow(2).mean().backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    for got, want in zip(train(True), train(False), strict=True):
        torch.testing.assert_close(got, want)
