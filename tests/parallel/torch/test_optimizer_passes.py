"""Uses that plain PyTorch allows between two steps: other hooks, several or no backward passes, failing passes."""

import copy

import pytest
import torch
from optimizer_events import Breaks
from optimizer_support import (
    Forked,
    assert_ranks_agree,
    assert_same_weights,
    batches,
    mine,
    mse,
    small_model,
    train_alone,
)

import horovod.torch as hvd

hvd.init()
SIZE = hvd.size()
several = pytest.mark.skipif(SIZE == 1, reason="needs several ranks")


def make_sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01)


def wrap(model, **options):
    return hvd.DistributedOptimizer(
        make_sgd(model.parameters()), model.named_parameters(), **options
    )


# ---- hooks of the user ---------------------------------------------------------------------------------------------


def test_hooks_follow_a_parameter_to_another_dtype(monkeypatch):
    monkeypatch.setattr("horovod.torch._gradient_sending._host_bytes", lambda: 1)
    model = small_model(dtype=torch.float32)
    optimizer = wrap(model)
    for dtype in (torch.float64, torch.bfloat16, torch.float64):
        model.to(dtype)
        for x, y in batches(2, dtype=dtype):
            optimizer.zero_grad()
            mse(model, mine(x), mine(y)).backward()
            grads = torch.nn.ParameterList(p.grad for p in model.parameters())
            assert_ranks_agree(grads)  # reduced in backward
        optimizer.state.clear()


def test_hooks_without_accumulation_nodes(monkeypatch):
    """With a torch that does not tell which node runs, those of the tensor do."""
    monkeypatch.setattr("horovod.torch._gradient_hooks._current_node", None)
    model = small_model()
    model[1].requires_grad_(False)
    expected = train_alone(model, make_sgd, batches(3))
    optimizer = wrap(model)
    for x, y in batches(3):
        optimizer.zero_grad()
        mse(model, mine(x), mine(y)).backward()
        optimizer.step()
    assert_same_weights(model, expected)
    if SIZE > 1:
        mse(model, mine(x), mine(y)).backward()
        with pytest.raises(AssertionError, match="computed more than backward_passes_per_step"):
            mse(model, mine(x), mine(y)).backward()


# ---- several backward passes before a step -------------------------------------------------------------------------


def three_numbers(**options):
    """Three parameters, of which a pass may use any, and their optimizer at rate 1: a step subtracts the gradients."""
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in "abc"]
    named = list(zip("abc", params, strict=True))
    return params, hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), named, **options)


@several
def test_a_group_that_came_in_two_passes_is_whole_in_the_next_on_some_ranks_only():
    for groups in (1, None):
        params, optimizer = three_numbers(groups=groups)
        a, b, c = params
        for _ in range(2):
            optimizer.zero_grad()
            a.sum().backward()  # leaves without the rest of the group, which no rank has
            (a + b + c if hvd.rank() == 0 else a).sum().backward()
            a.sum().backward()
            optimizer.step()
        totals = [param.item() for param in params]
        assert totals == pytest.approx([-6.0, -2.0 / SIZE, -2.0 / SIZE])


@several
def test_what_was_only_accumulated_on_a_rank_that_is_in_backward_counts_for_those_in_step():
    """No parameter had both passes on the other ranks: they come to the step while rank 0 waits in `backward()`."""
    for groups in (None, 1):
        params, optimizer = three_numbers(backward_passes_per_step=2, groups=groups)
        a, b, c = params
        for _ in range(2):
            optimizer.zero_grad()
            for used in (a, a + c) if hvd.rank() == 0 else (a, b):
                used.sum().backward()
            optimizer.step()
        others = SIZE - 1
        totals = [-2.0 * (2 + others) / SIZE, -2.0 * others / SIZE, -2.0 / SIZE]
        assert [param.item() for param in params] == pytest.approx(totals)


@several
@pytest.mark.parametrize("options", [{}, {"groups": 1}, {"backward_passes_per_step": 2}], ids=str)
def test_a_batch_may_be_skipped_of_which_a_rank_has_accumulated_more(options):
    """Rank 0 is told of a gradient that it does not have; nobody is told of one that was accumulated only."""
    params, optimizer = three_numbers(**options)
    a, b, c = params
    for _ in range(3):
        optimizer.zero_grad()
        with optimizer.no_sync():
            (a + b).sum().backward()
        for _ in range(options.get("backward_passes_per_step", 1)):
            (a if hvd.rank() == 0 else a + c).sum().backward()
        optimizer.zero_grad()
    a.sum().backward()
    optimizer.step()
    assert [param.item() for param in params] == [-1.0, 0.0, 0.0]


def test_the_accumulated_gradient_is_the_same_tensor():
    model = small_model()
    optimizer = wrap(model)
    ((x, y),) = batches(1)
    mse(model, mine(x), mine(y)).backward()
    first = [p.grad for p in model.parameters()]
    mse(model, mine(x), mine(y)).backward()
    assert all(p.grad is g for p, g in zip(model.parameters(), first, strict=True))
    optimizer.step()
    assert_ranks_agree(model)


# ---- passes that are thrown away -----------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", ["optimizer", "model"])
def test_adversarial_training_as_the_dcgan_example_writes_it(zero):
    """The judge gets gradients in the maker's pass, too, which nobody asked for."""
    torch.manual_seed(0)
    nets = torch.nn.ModuleDict(
        {"maker": torch.nn.Linear(5, 5), "judge": torch.nn.Linear(5, 1)}
    ).double()
    hvd.broadcast_parameters(nets.state_dict(), root_rank=0)
    alone = copy.deepcopy(nets)

    def train(nets, optimizers, shares):
        maker, judge = nets["maker"], nets["judge"]

        def clear(name):
            (optimizers[name] if zero == "optimizer" else nets[name]).zero_grad()

        for x, _ in batches(4):
            clear("judge")
            for r in shares:
                (judge(mine(x, r)).pow(2).mean() / len(shares)).backward()
            fakes = [maker(mine(x, r)) for r in shares]
            for fake in fakes:
                (judge(fake.detach()).sub(1).pow(2).mean() / len(shares)).backward()
            optimizers["judge"].step()
            clear("maker")
            for fake in fakes:
                (judge(fake).pow(2).mean() / len(shares)).backward()
            optimizers["maker"].step()

    optimizers = {
        name: hvd.DistributedOptimizer(make_sgd(net.parameters()), net.named_parameters(name))
        for name, net in nets.items()
    }
    train(nets, optimizers, [hvd.rank()])
    train(alone, {n: make_sgd(net.parameters()) for n, net in alone.items()}, range(SIZE))
    assert_same_weights(nets, alone)
    assert_ranks_agree(nets)


# ---- parameters without a gradient ---------------------------------------------------------------------------------


@several
@pytest.mark.parametrize("groups", [None, 1])
def test_parameters_without_a_gradient_get_zeros(groups):
    """As in Horovod: loops over `p.grad.norm()` work, and weight decay acts on them. Frozen ones get nothing."""
    model = Forked()
    model.left.requires_grad_(False)
    start = copy.deepcopy(model)
    optimizer = wrap(model, groups=groups)
    for x, _ in batches(2):
        optimizer.zero_grad()
        loss = model(mine(x), right=hvd.rank() == 0).pow(2).mean()
        loss.backward()
        optimizer.synchronize()
        norms = [p.grad.norm() for p in model.parameters() if p.requires_grad]
        assert sum(norms) > 0
        assert not model.idle.weight.grad.any()
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()
        model(mine(x)).sum().backward()
        optimizer.step()
        assert model.idle.bias.grad is not None
    assert model.left.weight.grad is None
    assert torch.equal(model.left.weight, start.left.weight)
    assert not torch.equal(model.idle.weight, start.idle.weight)
    assert_ranks_agree(model)


# ---- ranks that do not do the same ---------------------------------------------------------------------------------


@several
@pytest.mark.parametrize(
    ("first", "others"), [("step", ""), ("step", "zero_grad"), ("zero_grad", "")], ids=str
)
def test_ranks_at_different_steps_are_told(first, others):
    """Rank 0 takes a step after the first pass, or skips it; the others add another pass to it, or skip the batch."""
    model = small_model()
    optimizer = wrap(model)
    ((x, y),) = batches(1)
    mse(model, mine(x), mine(y)).backward()
    if method := first if hvd.rank() == 0 else others:
        getattr(optimizer, method)()
    with pytest.raises(RuntimeError, match=r"not at the same step.*no_sync\(\)"):
        mse(model, mine(x), mine(y)).backward()
    hvd.barrier()
    hvd.shutdown()  # what only some ranks sent is forgotten


@several
def test_a_rank_that_fails_in_backward_alone_is_told_by_the_next_reduction(monkeypatch):
    monkeypatch.setattr("horovod.torch._gradient_sending._host_bytes", lambda: 1)
    model = small_model()
    optimizer = wrap(model)
    ((x, y),) = batches(1)
    if hvd.rank() == 0:
        with pytest.raises(MemoryError):
            (model[1:](Breaks.apply(model[0](mine(x)))) - mine(y)).pow(2).sum().backward()
        optimizer.zero_grad()  # the others get what rank 0 had sent
    else:
        mse(model, mine(x), mine(y)).backward()
        optimizer.step()
    with pytest.raises(RuntimeError, match="not at the same step"):
        mse(model, mine(x), mine(y)).backward()
    hvd.barrier()
    hvd.shutdown()


@pytest.mark.parametrize("op", [hvd.Min, hvd.Max, hvd.Product])
def test_several_passes_are_refused_where_they_would_give_something_else(op):
    param = torch.nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), [("p", param)], op=op)
    param.sum().backward()
    with pytest.raises(
        AssertionError, match=r"Average and op=Sum only.*backward_passes_per_step.*no_sync"
    ):
        param.sum().backward()
    optimizer.zero_grad()
    with optimizer.no_sync():
        param.sum().backward()
    param.sum().backward()
    optimizer.step()
    want = {hvd.Min: 2.0, hvd.Max: 2.0, hvd.Product: 2.0**SIZE}[op]
    assert torch.equal(param.detach(), torch.full((3,), -want))
