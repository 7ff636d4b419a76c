"""`convert_sync_batchnorm`, and PyTorch's own SyncBatchNorm, which has nobody to synchronise with."""

import warnings

import pytest
import torch

import horovod.torch as hvd

hvd.init()
several = pytest.mark.skipif(hvd.size() == 1, reason="needs several ranks")


class Scaled(torch.nn.BatchNorm1d):
    """Adds something that a conversion would lose."""

    def forward(self, x):
        return super().forward(x) * 2


class Twice(torch.nn.Module):
    """One layer under two names, and in two modules."""

    def __init__(self):
        super().__init__()
        self.first = self.second = torch.nn.BatchNorm1d(3)
        self.inner = torch.nn.Sequential(torch.nn.Linear(3, 3), self.first)
        self.nothing = None
        self.register_module("empty", None)


def test_every_name_of_a_shared_module_is_converted():
    model = hvd.SyncBatchNorm.convert_sync_batchnorm(Twice())
    assert type(model.first) is hvd.SyncBatchNorm
    assert model.second is model.first
    assert model.inner[1] is model.first


@pytest.mark.parametrize("make", [lambda: Scaled(3), torch.nn.LazyBatchNorm1d])
def test_classes_that_may_do_more_are_refused_before_anything_is_converted(make):
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Sequential(make()))
    name = type(make()).__name__
    with pytest.raises(TypeError, match=rf"1\.0 is a {name}, which .* Nothing was converted"):
        hvd.SyncBatchNorm.convert_sync_batchnorm(model)
    assert type(model[0]) is torch.nn.BatchNorm1d


def test_classes_derived_from_ours_stay():
    class Own(hvd.SyncBatchNorm):
        pass

    model = hvd.SyncBatchNorm.convert_sync_batchnorm(torch.nn.Sequential(Own(3)))
    assert type(model[0]) is Own


def wrap(model):
    return hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )


@several
def test_pytorchs_own_synchronised_layer_is_named_until_it_is_converted():
    plain = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(plain)
    with pytest.warns(
        UserWarning, match=r"torch.nn.SyncBatchNorm \(1\) .* normalises its batch alone"
    ):
        wrap(model)
    model = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
    assert type(model[1]) is hvd.SyncBatchNorm
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrap(model)


@several
def test_compiled_autograd_is_refused():
    """PyTorch would call no hook in time, and clipping would see this rank's own gradients."""
    model = torch.nn.Linear(3, 2)
    optimizer = wrap(model)

    def backward(x):
        model(x).sum().backward()

    with (
        torch._dynamo.config.patch(compiled_autograd=True),
        pytest.raises(RuntimeError, match="this backward pass runs under compiled autograd"),
    ):
        torch.compile(backward, backend="eager")(torch.ones(4, 3))
    torch._dynamo.reset()
    optimizer.zero_grad()
    model(torch.full((4, 3), hvd.rank() + 1.0)).sum().backward()
    assert torch.equal(model.weight.grad, torch.full((2, 3), 2.0 * (hvd.size() + 1)))
    optimizer.step()
