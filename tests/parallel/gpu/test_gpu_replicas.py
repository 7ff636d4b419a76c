"""Replicas that never were equal, on GPUs. The other files here run unchecked: there no host waits for a GPU."""

import pytest
import torch
from devices import module_on_gpu, number_of_gpus, on_gpu

import horovod.torch as hvd
import replica_warnings
from replica_warnings import begin_again, check_named

hvd.init()
DEVICE = hvd.local_rank() % number_of_gpus()


@pytest.fixture
def is_checked(monkeypatch):
    monkeypatch.setenv("HOROVOD_CHECK_REPLICAS", "warn")
    yield
    monkeypatch.undo()
    begin_again()


found = replica_warnings.found


@pytest.mark.usefixtures("is_checked")
@pytest.mark.parametrize("differ", [False, True])
def test_weights_are_compared_before_the_first_step(found, differ):
    torch.manual_seed(hvd.rank() if differ else 0)
    net = module_on_gpu(torch.nn.Linear(3, 2), DEVICE)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1), named_parameters=net.named_parameters()
    )
    for _ in range(2):
        optimizer.zero_grad()
        net(on_gpu(torch.ones(1, 3), DEVICE)).sum().backward()
        optimizer.step()
    if differ:
        check_named(found(), "2 of 2 parameters differ", "hvd.broadcast_parameters")
    else:
        assert found() == []
