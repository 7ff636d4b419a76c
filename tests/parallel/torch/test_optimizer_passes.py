"""What plain PyTorch allows between two steps: other hooks, several backward passes, none, and passes that fail."""

import copy

import pytest
import torch
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


def train_both(model, alone, optimizer, reference, losses, steps=3):
    """Train with `losses(model, rows)`, whose values get a backward pass each; alone on everybody's rows in turn."""
    for x, y in batches(steps):
        optimizer.zero_grad()
        for loss in losses(model, mine(x), mine(y)):
            loss.backward()
        optimizer.step()
        reference.zero_grad()
        for r in range(SIZE):
            for loss in losses(alone, mine(x, r), mine(y, r)):
                (loss / SIZE).backward()
        reference.step()


# ---- hooks of the user ---------------------------------------------------------------------------------------------


def clip_locally(model):
    """Changes a gradient by what this rank alone knows, as local clipping does."""

    def clip(p):
        p.grad.mul_(hvd.rank() + 1)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(clip)


@pytest.mark.parametrize(
    ("when", "options"),
    [
        ("before wrapping", {}),
        ("after wrapping", {}),
        ("both", {}),
        ("after wrapping", {"groups": 2}),
        ("after wrapping", {"compression": hvd.Compression.fp16}),
    ],
    ids=str,
)
def test_a_hook_of_the_user_is_done_before_a_gradient_leaves(when, options, monkeypatch):
    # Each gradient leaves at once.
    monkeypatch.setattr("horovod.torch._gradient_sending._HAND_OVER_BYTES", 1)
    model = small_model()
    alone = copy.deepcopy(model)
    if when != "after wrapping":
        clip_locally(model)
    optimizer = wrap(model, **options)
    if when != "before wrapping":
        clip_locally(model)
    reference = make_sgd(alone.parameters())
    for x, y in batches(3):
        optimizer.zero_grad()
        mse(model, mine(x), mine(y)).backward()
        optimizer.step()
        reference.zero_grad()
        for r in range(SIZE):
            factor = (r + 1) ** (2 if when == "both" else 1)
            (mse(alone, mine(x, r), mine(y, r)) * factor / SIZE).backward()
        reference.step()
    assert_same_weights(model, alone, 1e-1 if "compression" in options else 1e-12)
    assert_ranks_agree(model)


def test_hooks_follow_a_parameter_to_another_dtype(monkeypatch):
    monkeypatch.setattr("horovod.torch._gradient_sending._HAND_OVER_BYTES", 1)
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

SEVERAL = [
    {},
    {"groups": 2},
    {"backward_passes_per_step": 2},
    {"op": hvd.Sum},
    {"op": hvd.Sum, "groups": 2, "backward_passes_per_step": 2},
    {"gradient_predivide_factor": 2.0},
]


@pytest.mark.parametrize("options", SEVERAL, ids=str)
@pytest.mark.parametrize("wait", [True, False])
def test_several_passes_add_up(options, wait):
    """As in the DCGAN example: real and fake images have a backward pass each."""
    scale = SIZE if options.get("op") == hvd.Sum else 1
    model = small_model()
    alone = copy.deepcopy(model)
    optimizer, reference = wrap(model, **options), make_sgd(alone.parameters())
    optimizer.wait_in_backward = wait

    def losses(m, x, y):
        for i in range(3):
            yield mse(m, x * (i + 1), y) / (scale if m is model else 1)

    train_both(model, alone, optimizer, reference, losses)
    assert_same_weights(model, alone)
    assert_ranks_agree(model)


def test_passes_that_reach_other_parameters_each(monkeypatch):
    """Rank r uses layer r in one pass, all in the next, layer r + 1 in the last."""
    monkeypatch.setattr("horovod.torch._gradient_sending._HAND_OVER_BYTES", 1)
    for groups in (None, 1, 2):
        for wait in (True, False):
            model = torch.nn.ModuleList(torch.nn.Linear(5, 2) for _ in range(4)).double()
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            alone = copy.deepcopy(model)
            optimizer, reference = wrap(model, groups=groups), make_sgd(alone.parameters())
            optimizer.wait_in_backward = wait
            for x, _ in batches(3):
                optimizer.zero_grad()
                reference.zero_grad()
                for m, ranks in ((model, [hvd.rank()]), (alone, range(SIZE))):
                    for r in ranks:
                        for chosen in (m[r : r + 1], m, m[(r + 1) % 4 :][:1]):
                            loss = sum(layer(mine(x, r)).pow(2).mean() for layer in chosen)
                            (loss / len(ranks)).backward()
                optimizer.step()
                reference.step()
            assert_same_weights(model, alone)
            assert_ranks_agree(model)


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


def test_autograd_grad_between_backward_and_step_leaves_gradients_alone():
    model = small_model()
    expected = train_alone(model, make_sgd, batches(3))
    optimizer = wrap(model)
    for x, y in batches(3):
        optimizer.zero_grad()
        mse(model, mine(x), mine(y)).backward()
        before = [p.grad.clone() for p in model.parameters()]
        torch.autograd.grad(mse(model, mine(x), mine(y)), list(model.parameters()))
        for p, grad in zip(model.parameters(), before, strict=True):
            assert torch.equal(p.grad, grad)
        optimizer.step()
    assert_same_weights(model, expected)


def test_sparse_gradients_of_several_passes_add_up():
    torch.manual_seed(0)
    table = torch.nn.Embedding(6, 2, sparse=True).double()
    alone = copy.deepcopy(table)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(table.parameters(), lr=1.0), table.named_parameters()
    )
    reference = torch.optim.SGD(alone.parameters(), lr=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        reference.zero_grad()
        for m, ranks in ((table, [hvd.rank()]), (alone, range(SIZE))):
            for r in ranks:
                for number in (1, 2):
                    found = m(torch.tensor([r, number])) * number
                    (found.sum() / len(ranks)).backward()
        optimizer.step()
        reference.step()
    assert_same_weights(table, alone)


@pytest.mark.parametrize("order", ["plain first", "checkpoint first"])
@pytest.mark.parametrize("options", [{}, {"groups": 1}, {"op": hvd.Sum}], ids=str)
def test_a_reentrant_checkpoint_of_a_module_used_plainly_too(order, options, monkeypatch):
    """Its parameters get several gradients within one pass, some in a pass inside the pass."""
    monkeypatch.setattr("horovod.torch._gradient_sending._HAND_OVER_BYTES", 1)
    torch.manual_seed(0)
    model = torch.nn.ModuleList([torch.nn.Linear(5, 5), torch.nn.Linear(5, 2)]).double()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    alone = copy.deepcopy(model)
    optimizer, reference = wrap(model, **options), make_sgd(alone.parameters())
    scale = SIZE if "op" in options else 1

    def losses(m, x, y):
        def checkpointed(rows):
            return torch.utils.checkpoint.checkpoint(m[0], rows, use_reentrant=True).tanh()

        def plain(rows):
            return m[0](rows).tanh()

        parts = [plain, checkpointed, checkpointed]
        for part in parts if order == "plain first" else parts[::-1]:
            x = part(x if x.requires_grad else x.clone().requires_grad_())
        yield (m[1](x) - y).pow(2).mean() / (scale if m is model else 1)

    train_both(model, alone, optimizer, reference, losses)
    assert_same_weights(model, alone)
    assert_ranks_agree(model)


def test_all_layers_checkpointed():
    model = small_model()
    expected = train_alone(model, make_sgd, batches(3))
    optimizer = wrap(model)
    for x, y in batches(3):
        optimizer.zero_grad()
        out = mine(x).clone().requires_grad_()
        for part in (model[:1], model[1:3], model[3:]):
            out = torch.utils.checkpoint.checkpoint(part, out, use_reentrant=True)
        (out - mine(y)).pow(2).mean().backward()
        optimizer.step()
    assert_same_weights(model, expected)


# ---- passes that are thrown away -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("zero", "wait", "options"),
    [
        ("optimizer", True, {}),
        ("optimizer", False, {}),
        ("optimizer", True, {"groups": 2}),
        ("model", True, {}),
        ("model", False, {}),
        ("model", True, {"op": hvd.Sum}),
        ("model in place", True, {}),
        ("model in place", True, {"op": hvd.Sum}),
    ],
    ids=str,
)
def test_a_batch_may_be_skipped_after_backward(zero, wait, options):
    scale = SIZE if "op" in options else 1
    model = small_model()
    expected = train_alone(model, make_sgd, batches(3))
    optimizer = wrap(model, **options)
    optimizer.wait_in_backward = wait
    for x, y in batches(3):
        for factor in (5.0, 7.0, 1.0):
            if zero == "optimizer":
                optimizer.zero_grad()
            else:
                model.zero_grad(set_to_none=zero == "model")
            (mse(model, mine(x), mine(y)) * factor / scale).backward()
        optimizer.step()
    assert_same_weights(model, expected)
    assert_ranks_agree(model)


class Breaks(torch.autograd.Function):
    """Where memory runs out."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise MemoryError("out of memory")


@pytest.mark.parametrize("zero", ["optimizer", "model"])
@pytest.mark.parametrize(
    ("options", "bytes_"), [({}, 1), ({}, 1 << 20), ({"groups": 2}, 1)], ids=str
)
def test_backward_may_fail_half_way(zero, options, bytes_, monkeypatch):
    monkeypatch.setattr("horovod.torch._gradient_sending._HAND_OVER_BYTES", bytes_)
    model = small_model()
    expected = train_alone(model, make_sgd, batches(3))
    optimizer = wrap(model, **options)
    for x, y in batches(3):
        zeroed = optimizer if zero == "optimizer" else model
        zeroed.zero_grad()
        with pytest.raises(MemoryError):
            (model[1:](Breaks.apply(model[0](mine(x)))) - mine(y)).pow(2).sum().backward()
        zeroed.zero_grad()
        mse(model, mine(x), mine(y)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
    assert_same_weights(model, expected)
    assert_ranks_agree(model)


def test_sharpness_aware_minimisation():
    """Two passes per step, the first one only to find where to take the second one."""

    def step(model, optimizer, loss):
        loss(model).backward()
        moves = [0.05 * p.grad / p.grad.norm() for p in model.parameters()]
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.add_(move)
        optimizer.zero_grad()
        loss(model).backward()
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.sub_(move)
        optimizer.step()
        optimizer.zero_grad()

    model = small_model()
    alone = copy.deepcopy(model)
    optimizer, reference = wrap(model), make_sgd(alone.parameters())
    for x, y in batches(3):
        step(model, optimizer, lambda m, x=x, y=y: mse(m, mine(x), mine(y)))
        step(alone, reference, lambda m, x=x, y=y: mse(m, x, y))
    assert_same_weights(model, alone, 1e-9)
    assert_ranks_agree(model)


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
@pytest.mark.parametrize("other", ["step", "zero_grad"])
def test_ranks_at_different_steps_are_told(other):
    """Rank 0 takes a step after the first pass; the others add another pass to it, or skip the batch."""
    model = small_model()
    optimizer = wrap(model)
    ((x, y),) = batches(1)
    mse(model, mine(x), mine(y)).backward()
    if hvd.rank() == 0:
        optimizer.step()
    elif other == "zero_grad":
        optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"not at the same step.*no_sync\(\)"):
        mse(model, mine(x), mine(y)).backward()
    hvd.barrier()
    hvd.shutdown()  # what only some ranks sent is forgotten


@several
def test_a_rank_that_fails_in_backward_alone_is_told_by_the_next_reduction(monkeypatch):
    monkeypatch.setattr("horovod.torch._gradient_sending._HAND_OVER_BYTES", 1)
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


@several
@pytest.mark.parametrize("wait", [True, False])
def test_a_pass_that_only_one_rank_ran_counts_when_ranks_meet_at_the_step(wait):
    """An early step: rank 0 has accumulated two passes, the others one."""
    model = small_model()
    alone = copy.deepcopy(model)
    optimizer = wrap(model, backward_passes_per_step=3)
    optimizer.wait_in_backward = wait
    reference = make_sgd(alone.parameters())
    for x, y in batches(2):
        optimizer.zero_grad()
        reference.zero_grad()
        for r in range(SIZE):
            for _ in range(2 if r == 0 else 1):
                (mse(alone, mine(x, r), mine(y, r)) / SIZE).backward()
        for _ in range(2 if hvd.rank() == 0 else 1):
            mse(model, mine(x), mine(y)).backward()
        optimizer.step()
        reference.step()
    assert_same_weights(model, alone)


@several
def test_passes_that_only_one_rank_ran_count_without_waiting_in_backward():
    """Then ranks meet only at the step, where the others add nothing to them."""
    for groups in (None, 2):
        model = small_model()
        alone = copy.deepcopy(model)
        optimizer, reference = wrap(model, groups=groups), make_sgd(alone.parameters())
        optimizer.wait_in_backward = False
        for x, y in batches(2):
            optimizer.zero_grad()
            reference.zero_grad()
            for r in range(SIZE):
                for _ in range(3 if r == 0 else 1):
                    (mse(alone, mine(x, r), mine(y, r)) / SIZE).backward()
            for _ in range(3 if hvd.rank() == 0 else 1):
                mse(model, mine(x), mine(y)).backward()
            optimizer.step()
            reference.step()
        assert_same_weights(model, alone)
        assert_ranks_agree(model)


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
