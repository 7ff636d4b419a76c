"""A state's own methods without `elastic.run`: a sync renews the snapshot, and half-made sums end."""

import pytest
import torch

import horovod.torch as hvd
from horovod.torch.elastic.state import TorchState


def make(passes=1):
    """One weight, 1 more than the rank."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, hvd.rank() + 1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        backward_passes_per_step=passes,
        op=hvd.Sum,
    )
    return model, optimizer


def test_a_sync_renews_the_snapshot():
    model, optimizer = make()
    state = TorchState(model, optimizer, batch=hvd.rank())
    state.sync()
    with torch.no_grad():
        model.weight.fill_(9.0)
    state.batch = 9
    state.restore()
    assert model.weight.item() == 1.0
    assert state.batch == 0


@pytest.mark.parametrize("how", ["reset", "restore", "sync"])
def test_half_made_sums_end(how):
    model, optimizer = make(passes=2)
    state = TorchState(model, optimizer)
    state.sync()
    before = model.weight.item()
    (model.weight.sum() * 100).backward()
    getattr(state, how)()
    model.weight.sum().backward()
    model.weight.sum().backward()
    optimizer.step()
    assert before - model.weight.item() == 2.0 * hvd.size()
