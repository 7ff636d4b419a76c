"""Rows of docs/differences.md that concern users' numbers and that no other test of an operation holds."""

import math

import pytest
import torch

import horovod.torch as hvd

hvd.init()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("op", [hvd.Min, hvd.Max])
def test_a_nan_of_any_rank_wins_in_min_and_max(op, dtype):
    mine = torch.ones(hvd.size(), dtype=dtype)
    mine[hvd.rank()] = math.nan
    assert hvd.allreduce(mine, op=op).isnan().all()


def test_options_of_an_optimizer_without_state_are_broadcast():
    model = torch.nn.Linear(2, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1 * (hvd.rank() + 1))
    hvd.broadcast_optimizer_state(sgd, root_rank=0)
    assert sgd.param_groups[0]["lr"] == 0.1


def test_a_broadcast_makes_no_state_and_no_gradients():
    model = torch.nn.Linear(2, 1)
    adam = torch.optim.Adam(model.parameters(), weight_decay=0.1)
    before = [param.clone() for param in model.parameters()]
    hvd.broadcast_optimizer_state(adam, root_rank=0)
    assert not adam.state
    for param, value in zip(model.parameters(), before, strict=True):
        assert param.grad is None
        assert torch.equal(param, value)
