"""The Adasum delta optimizer: local steps, combined moves."""

import copy

import numpy as np
import pytest
import torch
from optimizer_support import (
    assert_ranks_agree,
    assert_same_weights,
    batches,
    combined,
    mine,
    mse,
    small_model,
)

import horovod.torch as hvd

hvd.init()
SIZE = hvd.size()
several = pytest.mark.skipif(SIZE == 1, reason="one rank uses the ordinary optimizer")


def reference_step(model, make_optimizer, state, losses):
    """One step of every rank from the same weights, combined with numpy; `state` holds each rank's optimizer."""
    start = [p.detach().clone() for p in model.parameters()]
    moves = []
    for rank, loss in enumerate(losses):
        twin = copy.deepcopy(model)
        optimizer = make_optimizer(twin.parameters())
        if rank in state:
            optimizer.load_state_dict(state[rank])
        loss(twin).backward()
        optimizer.step()
        state[rank] = copy.deepcopy(optimizer.state_dict())
        moves.append(
            [(p.detach() - s).numpy() for p, s in zip(twin.parameters(), start, strict=True)]
        )
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(start[i] + torch.from_numpy(combined([np.asarray(m[i]) for m in moves])))


MAKERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
}


def wrapped(model, make=MAKERS["SGD"], named=True, **options):
    names = model.named_parameters() if named else None
    return hvd.DistributedOptimizer(make(model.parameters()), names, op=hvd.Adasum, **options)


def test_equal_gradients_give_the_local_step():
    model = small_model()
    alone = copy.deepcopy(model)
    optimizer, reference = wrapped(model), MAKERS["SGD"](alone.parameters())
    for x, y in batches(2, count=1):
        optimizer.zero_grad()
        reference.zero_grad()
        mse(model, x, y).backward()
        mse(alone, x, y).backward()
        optimizer.step()
        reference.step()
    assert_same_weights(model, alone, 1e-9)


def test_parameters_are_never_seen_as_moves():
    model = small_model()
    before = copy.deepcopy(model)
    optimizer = wrapped(model)
    ((x, y),) = batches(1)
    mse(model, mine(x), mine(y)).backward()
    assert_same_weights(model, before, 0)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    assert_ranks_agree(model)


def test_several_unnamed_groups():
    model = small_model()
    params = list(model.parameters())
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([{"params": params[:2]}, {"params": params[2:], "lr": 0.01}], lr=0.1),
        op=hvd.Adasum,
    )
    for x, y in batches(2):
        optimizer.zero_grad()
        mse(model, mine(x), mine(y)).backward()
        optimizer.step()
    assert_ranks_agree(model)


def test_accumulation_and_a_closure():
    model = small_model()
    expected = copy.deepcopy(model)
    optimizer = wrapped(model, backward_passes_per_step=2)
    (x1, y1), (x2, y2) = batches(2)

    def closure():
        optimizer.zero_grad()
        mse(model, mine(x1), mine(y1)).backward()
        loss = mse(model, mine(x2), mine(y2))
        loss.backward()
        return loss

    with torch.no_grad():
        value = mse(model, mine(x2), mine(y2))
    assert torch.equal(optimizer.step(closure).detach(), value)

    def both(m, r):
        return mse(m, mine(x1, r), mine(y1, r)) + mse(m, mine(x2, r), mine(y2, r))

    losses = [lambda m, r=r: both(m, r) for r in range(SIZE)]
    reference_step(expected, MAKERS["SGD"], {}, losses)
    assert_same_weights(model, expected, 1e-9)


@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_gradients(as_dense):
    """Adam refuses sparse gradients: only `sparse_as_dense` lets it work."""
    torch.manual_seed(2)
    table = torch.nn.Embedding(9, 3, sparse=True)
    make = torch.optim.Adam if as_dense else torch.optim.SGD
    optimizer = hvd.DistributedOptimizer(
        make(table.parameters(), lr=0.1),
        table.named_parameters(),
        op=hvd.Adasum if SIZE > 1 else hvd.Average,
        sparse_as_dense=as_dense,
    )
    before = table.weight.detach().clone()
    for _ in range(2):
        optimizer.zero_grad()
        table(torch.tensor([hvd.rank(), 8])).sum().backward()
        if as_dense and SIZE == 1:
            table.weight.grad = table.weight.grad.to_dense()
        optimizer.step()
    assert not torch.equal(table.weight[8], before[8])
    assert torch.equal(table.weight[7], before[7])
    assert_ranks_agree(table)


@several
def test_the_guard_rails():
    model = small_model()
    optimizer = wrapped(model)
    with pytest.raises(AssertionError, match="not supported when using Adasum optimizer"):
        optimizer.skip_synchronize()
    optimizer.synchronize()


@several
@pytest.mark.parametrize("zero", [True, False])
def test_parameters_without_a_gradient(zero):
    model = small_model()
    spare = torch.nn.Parameter(torch.ones(3).double())
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([*model.parameters(), spare], lr=0.1, weight_decay=0.5),
        op=hvd.Adasum,
        zero_missing_gradients=zero,
    )
    ((x, y),) = batches(1)
    mse(model, mine(x), mine(y)).backward()
    optimizer.step()
    assert (spare.grad is not None) == zero
    assert torch.allclose(spare, torch.full((3,), 0.95 if zero else 1.0).double())


@several
def test_only_the_global_process_set():
    model = small_model()
    other = hvd.ProcessSet([0])
    with pytest.raises(NotImplementedError, match="process set"):
        wrapped(model, process_set=other)


def test_what_it_keeps():
    model = small_model()
    inner = MAKERS["Adam"](model.parameters())
    seen = []
    inner.register_step_post_hook(lambda opt, args, kwargs: seen.append(opt))
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), op=hvd.Adasum)
    assert isinstance(optimizer, torch.optim.Adam)
    assert type(optimizer).__module__ == "horovod.torch.optimizer"
    assert optimizer.param_groups[0] is inner.param_groups[0]
    assert optimizer.op == hvd.Adasum
    assert optimizer.process_set is hvd.global_process_set
    ((x, y),) = batches(1)
    mse(model, mine(x), mine(y)).backward()
    optimizer.step()
    assert seen == [optimizer]
    optimizer.zero_grad(set_to_none=False)


def test_load_state_dict_begins_a_new_cycle():
    model = small_model()
    optimizer = wrapped(model)
    ((x, y),) = batches(1)
    mse(model, mine(x), mine(y)).backward()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.zero_grad()
    mse(model, mine(x), mine(y)).backward()
    optimizer.load_state_dict(saved)
    optimizer.zero_grad()
    mse(model, mine(x), mine(y)).backward()
    optimizer.step()
    assert_ranks_agree(model)


def test_a_group_added_later():
    model = small_model()
    params = list(model.parameters())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params[:2], lr=0.1), op=hvd.Adasum)
    optimizer.add_param_group({"params": params[2:]})
    for x, y in batches(2):
        optimizer.zero_grad()
        mse(model, mine(x), mine(y)).backward()
        optimizer.step()
    assert_ranks_agree(model)


def test_deep_copies_train_on_their_own():
    model = small_model()
    optimizer = wrapped(model)
    twin, twins = copy.deepcopy((model, optimizer))
    ((x, y),) = batches(1)
    mse(twin, mine(x), mine(y)).backward()
    twins.step()
    mse(model, mine(x), mine(y)).backward()
    optimizer.step()
    assert_same_weights(model, twin, 0)
    assert_ranks_agree(twin)


SCALED = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "Adam_fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
}


@pytest.mark.parametrize("make", SCALED.values(), ids=SCALED)
@pytest.mark.parametrize("unscale", [False, True])
def test_infinity_on_one_rank_skips_the_step_on_all(make, unscale):
    model = small_model(dtype=torch.float32)
    twin = copy.deepcopy(model)
    optimizer, plain = wrapped(model, make), wrapped(twin, make)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    for step, (x, y) in enumerate(batches(3, dtype=torch.float32)):
        before = copy.deepcopy(model)
        optimizer.zero_grad()
        loss = mse(model, mine(x), mine(y))
        overflow = step == 1
        scaler.scale(loss * float("inf") if overflow and hvd.rank() == 0 else loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if overflow:
            assert_same_weights(model, before, 0)
        else:
            plain.zero_grad()
            mse(twin, mine(x), mine(y)).backward()
            plain.step()
    assert_same_weights(model, twin, 1e-4)
    assert_ranks_agree(model)
