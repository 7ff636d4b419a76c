"""Documented scripts, for mypy and pyright to accept; this file is checked, never run."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, assert_type

import torch

import horovod.torch as hvd

hvd.init()
hvd.init([0, 1])
hvd.init(comm=None, process_sets=[hvd.ProcessSet([0, 1])])
hvd.init(process_sets="dynamic")

model = torch.nn.Linear(10, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
# The variable that held the optimizer takes the one that wraps it.
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
optimizer.zero_grad()
model(torch.randn(32, 10)).square().mean().backward()
optimizer.synchronize()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
with optimizer.skip_synchronize():
    optimizer.step()
with optimizer.no_sync():
    pass
# An unknown attribute would be accepted, as `Any`.
assert_type(optimizer.wait_in_backward, bool)
assert_type(optimizer.no_sync(), AbstractContextManager[None])
assert_type(optimizer.skip_synchronize(), AbstractContextManager[None])
optimizer.wait_in_backward = False
optimizer.set_backward_passes_per_step(2)
for group in optimizer.param_groups:
    group["lr"] *= 0.5
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
scaler = torch.amp.GradScaler("cpu")
scaler.step(optimizer)

loss: torch.Tensor = hvd.allreduce(torch.tensor(1.0), name="avg_loss")
last: int = hvd.join()


def take(state: hvd.elastic.TorchState, epochs: int) -> float:
    """A state whose types nobody wrote down, and attributes as targets of loops."""
    for state.epoch in range(state.epoch, epochs):  # noqa: B020 - as documented
        for state.batch, _ in enumerate(range(10)):
            state.optimizer.zero_grad()
            state.model(torch.randn(1, 10)).sum().backward()
            state.optimizer.step()
        state.batch = 0
        state.commit()
    return 0.5


train = hvd.elastic.run(take)


@hvd.elastic.run
def train_further(state: hvd.elastic.ObjectState, *, until: int = 3) -> list[int]:
    """Any state."""
    state.epoch += 1
    return [until]


state = hvd.elastic.TorchState(model, optimizer, epoch=0, batch=0)
assert_type(state.model, torch.nn.Linear)
state.optimizer.synchronize()
state.register_reset_callbacks([lambda: state.epoch])
assert_type(train(state, 3), float)
assert_type(train(state, epochs=3), float)
assert_type(train_further(state, until=4), list[int])
other = hvd.elastic.TorchState(net=model, schedule=scheduler)
other.schedule.step()
kept: Any = other.net
