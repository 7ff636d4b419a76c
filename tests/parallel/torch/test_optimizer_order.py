"""Scripts in their natural order: clip, scale, skip, freeze, thaw, leave parameters unused, move the model."""

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
several = pytest.mark.skipif(hvd.size() == 1, reason="needs several ranks")


@pytest.fixture(autouse=True, scope="module")
def _dynamic_sets(_job):
    """The other files of this job began it without."""
    hvd.shutdown()
    hvd.init(process_sets="dynamic")
    yield
    hvd.shutdown()


def make_sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01)


def wrap(model, **options):
    return hvd.DistributedOptimizer(
        make_sgd(model.parameters()), model.named_parameters(), **options
    )


# ---- clipping ------------------------------------------------------------------------------------------------------


def clip(model):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)


@pytest.mark.parametrize("options", [{}, {"groups": 2}, {"compression": hvd.Compression.fp16}])
def test_clipping_between_backward_and_step_sees_reduced_gradients(options):
    model = small_model()
    expected = train_alone(model, make_sgd, batches(4), between=clip)
    optimizer = wrap(model, **options)
    for x, y in batches(4):
        optimizer.zero_grad()
        mse(model, mine(x), mine(y)).backward()
        clip(model)
        optimizer.step()
    assert_same_weights(model, expected, 1e-3 if "compression" in options else 1e-12)
    assert_ranks_agree(model)


def test_clipping_after_an_explicit_synchronize():
    model = small_model()
    expected = train_alone(model, make_sgd, batches(4), between=clip)
    optimizer = wrap(model)
    for x, y in batches(4):
        optimizer.zero_grad()
        mse(model, mine(x), mine(y)).backward()
        optimizer.synchronize()
        clip(model)
        with optimizer.skip_synchronize():
            optimizer.step()
    assert_same_weights(model, expected)


def test_skip_synchronize_may_be_nested_and_held_open():
    model = small_model()
    expected = train_alone(model, make_sgd, batches(3), between=clip)
    optimizer = wrap(model)
    with optimizer.skip_synchronize():
        for x, y in batches(3):
            optimizer.zero_grad()
            mse(model, mine(x), mine(y)).backward()
            optimizer.synchronize()
            clip(model)
            with optimizer.skip_synchronize():
                optimizer.step()
    assert_same_weights(model, expected)


def test_clipping_with_parameters_that_only_some_ranks_use():
    """Rank r uses the left branch if r is even, the right one otherwise; nobody uses the idle one."""
    model = Forked()
    alone = copy.deepcopy(model)
    reference = make_sgd(alone.parameters())
    optimizer = wrap(model, zero_missing_gradients=False)
    for x, _ in batches(3):
        optimizer.zero_grad()
        even = hvd.rank() % 2 == 0
        model(mine(x), left=even, right=not even).pow(2).mean().backward()
        clip(model)
        optimizer.step()
        reference.zero_grad()
        parts = [
            alone(mine(x, r), left=r % 2 == 0, right=r % 2 == 1).pow(2).mean()
            for r in range(hvd.size())
        ]
        (sum(parts) / hvd.size()).backward()
        clip(alone)
        reference.step()
    assert_same_weights(model, alone)
    assert_ranks_agree(model)


# ---- parameters without a gradient ---------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [None, 1, 2, 3])
@pytest.mark.parametrize("passes", [1, 2])
def test_ranks_that_use_different_parameters_agree(passes, groups):
    model = Forked()
    alone = copy.deepcopy(model)
    optimizer = wrap(
        model, backward_passes_per_step=passes, groups=groups, zero_missing_gradients=False
    )
    reference = make_sgd(alone.parameters())

    def use(step, number, rank):
        return {"left": (step + rank) % 2 == 0, "right": (number + rank) % 3 == 0}

    for step in range(4):
        optimizer.zero_grad()
        reference.zero_grad()
        for number, (x, _) in enumerate(batches(passes, seed=step)):
            model(mine(x), **use(step, number, hvd.rank())).pow(2).mean().backward()
            for rank in range(hvd.size()):
                loss = alone(mine(x, rank), **use(step, number, rank)).pow(2).mean()
                (loss / hvd.size()).backward()
        optimizer.step()
        reference.step()
    assert_same_weights(model, alone)
    assert_ranks_agree(model)


@several
@pytest.mark.parametrize("groups", [None, 2])
def test_a_rank_that_uses_everything_meets_others_that_do_not(groups):
    """It announces that with its last gradient, the others when their pass is over; ranks take turns."""
    model = torch.nn.ModuleList(torch.nn.Linear(4, 2).double() for _ in range(3))
    optimizer = wrap(model, groups=groups)
    for step in range(2 * hvd.size()):
        optimizer.zero_grad()
        chosen = model if hvd.rank() == step % hvd.size() else model[:1]
        sum(layer(torch.ones(4).double()).sum() for layer in chosen).backward()
        for layer, users in zip(model, (hvd.size(), 1, 1), strict=True):
            assert torch.allclose(layer.bias.grad * hvd.size(), torch.tensor(users).double())
        optimizer.step()
    assert_ranks_agree(model)


@pytest.mark.parametrize("groups", [None, 1])
def test_a_parameter_that_no_rank_uses_keeps_none_if_asked(groups):
    """So weight decay does not act on it, as in one process."""
    model = Forked()
    before = copy.deepcopy(model.idle)
    optimizer = wrap(model, groups=groups, zero_missing_gradients=False)
    for x, _ in batches(2):
        optimizer.zero_grad()
        model(mine(x)).pow(2).mean().backward()
        optimizer.step()
        assert model.idle.weight.grad is None
    assert_same_weights(model.idle, before, 0)


def test_a_collective_between_backward_and_step_does_not_lock_up_with_unused_parameters():
    model = Forked()
    optimizer = wrap(model)
    for x, _ in batches(3):
        optimizer.zero_grad()
        loss = model(mine(x), left=hvd.rank() == 0).pow(2).mean()
        loss.backward()
        mean = hvd.allreduce(loss.detach(), name="avg_loss")
        optimizer.step()
        assert torch.isfinite(mean)
    assert_ranks_agree(model)


def test_gradients_set_by_hand_are_reduced():
    param = torch.nn.Parameter(torch.zeros(4))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), [("p", param)])
    param.grad = torch.full((4,), float(hvd.rank()))
    optimizer.step()
    assert torch.allclose(param.detach(), torch.full((4,), -(hvd.size() - 1) / 2))


def test_zeroed_instead_of_none():
    model = Forked()
    optimizer = wrap(model)
    for x, _ in batches(4):
        optimizer.zero_grad(set_to_none=False)
        model(mine(x), left=hvd.rank() % 2 == 0).pow(2).mean().backward()
        clip(model)
        optimizer.step()
    assert_ranks_agree(model)


# ---- freezing and thawing ------------------------------------------------------------------------------------------


def test_a_parameter_thawed_after_wrapping_is_reduced():
    model = small_model()
    model[0].requires_grad_(False)
    alone = copy.deepcopy(model)
    optimizer, reference = wrap(model), make_sgd(alone.parameters())
    for step, (x, y) in enumerate(batches(4)):
        optimizer.zero_grad()
        reference.zero_grad()
        if step == 2:
            model[0].requires_grad_(True)
            alone[0].requires_grad_(True)
        mse(model, mine(x), mine(y)).backward()
        clip(model)
        optimizer.step()
        mse(alone, x, y).backward()
        clip(alone)
        reference.step()
    assert_same_weights(model, alone)


@pytest.mark.parametrize("groups", [None, 2])
def test_a_parameter_frozen_after_wrapping_stays(groups):
    model = small_model()
    optimizer = wrap(model, groups=groups)
    model[3].requires_grad_(False)
    before = model[3].weight.clone()
    for x, y in batches(2):
        optimizer.zero_grad()
        mse(model, mine(x), mine(y)).backward()
        optimizer.step()
    assert torch.equal(model[3].weight, before)
    assert_ranks_agree(model)


def test_two_optimizers_that_take_turns_in_one_graph():
    """The usual adversarial training: one network is frozen while the other one learns."""
    torch.manual_seed(0)
    maker, judge = torch.nn.Linear(5, 5).double(), torch.nn.Linear(5, 1).double()
    makers = hvd.DistributedOptimizer(
        torch.optim.SGD(maker.parameters(), lr=0.1),
        [(f"g.{n}", p) for n, p in maker.named_parameters()],
    )
    judges = hvd.DistributedOptimizer(
        torch.optim.SGD(judge.parameters(), lr=0.1),
        [(f"d.{n}", p) for n, p in judge.named_parameters()],
    )
    for turn, (x, _) in enumerate(batches(6)):
        maker.requires_grad_(turn % 2 == 0)
        judge.requires_grad_(turn % 2 == 1)
        makers.zero_grad()
        judges.zero_grad()
        judge(maker(mine(x))).pow(2).mean().backward()
        assert all((p.grad is not None) == (turn % 2 == 0) for p in maker.parameters())
        assert all((p.grad is not None) == (turn % 2 == 1) for p in judge.parameters())
        (makers if turn % 2 == 0 else judges).step()
    assert_ranks_agree(maker)
    assert_ranks_agree(judge)


def test_two_optimizers_in_one_backward_pass():
    model, head = small_model(), small_model(2)
    both = torch.nn.ModuleList([model, head])
    expected = copy.deepcopy(both)
    optimizers = [
        hvd.DistributedOptimizer(
            make_sgd(part.parameters()), [(f"{i}.{n}", p) for n, p in part.named_parameters()]
        )
        for i, part in enumerate(both)
    ]
    references = [make_sgd(part.parameters()) for part in expected]
    for x, y in batches(3):
        for optimizer in optimizers + references:
            optimizer.zero_grad()
        (mse(both[0], mine(x), mine(y)) + mse(both[1], mine(x), mine(y))).backward()
        (mse(expected[0], x, y) + mse(expected[1], x, y)).backward()
        for optimizer in optimizers + references:
            optimizer.step()
    assert_same_weights(both, expected)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("added_to", ["wrapper", "original"])
def test_a_group_added_after_wrapping_is_reduced(named, added_to):
    """The usual fine-tuning: layers thaw one after the other and join the optimizer."""
    model = small_model()
    model[3].requires_grad_(False)
    alone = copy.deepcopy(model)
    names = model.named_parameters() if named else None
    original = make_sgd(model[:2].parameters())
    optimizer = hvd.DistributedOptimizer(original, names)
    reference = make_sgd(alone[:2].parameters())
    target = optimizer if added_to == "wrapper" else original
    for step, (x, y) in enumerate(batches(4)):
        if step == 1:
            for part, owner in ((model, target), (alone, reference)):
                part[3].requires_grad_(True)
                owner.add_param_group({"params": part[3].parameters(), "lr": 0.05})
        optimizer.zero_grad()
        reference.zero_grad()
        mse(model, mine(x), mine(y)).backward()
        clip(model)
        optimizer.step()
        mse(alone, x, y).backward()
        clip(alone)
        reference.step()
    assert len(optimizer.param_groups) == 2
    assert_same_weights(model, alone)


def test_a_model_cast_after_wrapping():
    model = small_model(dtype=torch.float32)
    optimizer = wrap(model)
    model.double()
    expected = train_alone(model, make_sgd, batches(3), between=clip)
    for x, y in batches(3):
        optimizer.zero_grad()
        mse(model, mine(x), mine(y)).backward()
        clip(model)
        optimizer.step()
    assert_same_weights(model, expected)


def test_gradient_penalty_by_autograd_grad_in_between():
    """torch.autograd.grad runs tensor hooks but accumulates nothing."""
    model = small_model()
    alone = copy.deepcopy(model)
    optimizer, reference = wrap(model), make_sgd(alone.parameters())

    def penalised(m, x, y, count):
        loss = mse(m, x, y)
        grads = torch.autograd.grad(loss, list(m.parameters()), create_graph=True)
        single = torch.autograd.grad(loss, m[0].weight, create_graph=True)[0]
        return (loss + sum(g.pow(2).sum() for g in grads) * 0.1 + single.sum() * 0.01) / count

    for x, y in batches(3):
        optimizer.zero_grad()
        penalised(model, mine(x), mine(y), 1).backward()
        clip(model)
        optimizer.step()
        reference.zero_grad()
        for r in range(hvd.size()):
            penalised(alone, mine(x, r), mine(y, r), hvd.size()).backward()
        clip(alone)
        reference.step()
    assert_same_weights(model, alone, 1e-10)


# ---- loss scaling --------------------------------------------------------------------------------------------------

SCALED = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "AdamW_fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


@pytest.mark.parametrize("make", SCALED.values(), ids=SCALED)
@pytest.mark.parametrize("unscale", ["unscale", "not"])
@pytest.mark.parametrize("zero", ["optimizer", "model"])
def test_infinity_on_one_rank_skips_the_step_on_all(make, unscale, zero):
    model = small_model(dtype=torch.float32)
    optimizer = hvd.DistributedOptimizer(make(model.parameters()), model.named_parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    weights, scales = [], []
    for step, (x, y) in enumerate(batches(4, dtype=torch.float32)):
        (optimizer if zero == "optimizer" else model).zero_grad()
        loss = mse(model, mine(x), mine(y))
        if step == 1 and hvd.rank() == hvd.size() - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if unscale == "unscale":
            scaler.unscale_(optimizer)
            clip(model)
        scaler.step(optimizer)
        scaler.update()
        weights.append(torch.cat([p.detach().flatten().clone() for p in model.parameters()]))
        scales.append(scaler.get_scale())
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])
    assert scales == [1024.0, 512.0, 512.0, 512.0]
    assert torch.isfinite(weights[3]).all()
    assert_ranks_agree(model)


def test_scaled_training_equals_unscaled_training():
    make = SCALED["SGD"]
    model = small_model(dtype=torch.float32)
    expected = train_alone(model, make, batches(4, dtype=torch.float32), between=clip)
    optimizer = hvd.DistributedOptimizer(make(model.parameters()), model.named_parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for x, y in batches(4, dtype=torch.float32):
        optimizer.zero_grad()
        scaler.scale(mse(model, mine(x), mine(y))).backward()
        scaler.unscale_(optimizer)
        clip(model)
        scaler.step(optimizer)
        scaler.update()
    assert_same_weights(model, expected, 1e-5)


def test_loss_scaling_as_the_mnist_example_writes_it():
    model = small_model(dtype=torch.float32)
    expected = train_alone(model, make_sgd, batches(3, dtype=torch.float32))
    optimizer = wrap(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for x, y in batches(3, dtype=torch.float32):
        optimizer.zero_grad()
        scaler.scale(mse(model, mine(x), mine(y))).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
    assert_same_weights(model, expected, 1e-5)


def test_an_early_step_of_the_scaler_agrees_on_skipping():
    """One pass of two, and only one rank overflows."""
    model = small_model(dtype=torch.float32)
    before = copy.deepcopy(model)
    optimizer = wrap(model, backward_passes_per_step=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step, (x, y) in enumerate(batches(2, dtype=torch.float32)):
        optimizer.zero_grad()
        loss = mse(model, mine(x), mine(y))
        scaler.scale(loss * float("inf") if step == 0 and hvd.rank() == 0 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step == 0:
            assert_same_weights(model, before, 0)
            assert scaler.get_scale() == 32.0
    assert_ranks_agree(model)


# ---- sparse gradients ----------------------------------------------------------------------------------------------


class Words(torch.nn.Module):
    def __init__(self, vocabulary=11):
        super().__init__()
        torch.manual_seed(7)
        self.table = torch.nn.Embedding(vocabulary, 4, sparse=True).double()
        self.spare = torch.nn.Embedding(vocabulary, 4, sparse=True).double()
        self.out = torch.nn.Linear(4, 1).double()

    def forward(self, words, spare=False):
        found = self.table(words).mean(1)
        if spare:
            found = found + self.spare(words).sum(1)
        return self.out(found)


@pytest.mark.parametrize("as_dense", [False, True])
@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.fp16])
@pytest.mark.parametrize("groups", [None, 1])
def test_sparse_embeddings(as_dense, compression, groups):
    """Rank 0 alone looks into the second table."""
    model = Words()
    alone = copy.deepcopy(model)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5),
        model.named_parameters(),
        sparse_as_dense=as_dense,
        compression=compression,
        groups=groups,
    )
    reference = torch.optim.SGD(alone.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        words = torch.randint(0, 11, (hvd.size() * 4, 6), generator=generator)
        optimizer.zero_grad()
        model(words[hvd.rank() * 4 :][:4], spare=hvd.rank() == 0).pow(2).mean().backward()
        optimizer.step()
        assert model.table.weight.grad.is_sparse
        reference.zero_grad()
        for r in range(hvd.size()):
            part = alone(words[r * 4 :][:4], spare=r == 0).pow(2).mean()
            (part / hvd.size()).backward()
        reference.step()
    assert_same_weights(model, alone, 1e-12 if compression is hvd.Compression.none else 1e-2)
    assert_ranks_agree(model)


def test_a_sparse_adam_keeps_its_sparse_gradients():
    model = Words()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SparseAdam(model.table.parameters(), lr=0.1), model.named_parameters()
    )
    words = torch.arange(8).reshape(2, 4) + hvd.rank()
    for _ in range(2):
        optimizer.zero_grad()
        model(words).sum().backward()
        optimizer.step()
    assert_ranks_agree(model.table)


# ---- process sets --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [None, 2])
def test_a_process_set_trains_among_its_members(groups):
    """Without rank 0 where there are enough ranks; the others train on their own data."""
    if hvd.size() < 2:
        pytest.skip("needs several ranks")
    ranks = list(range(1, hvd.size()))
    chosen = hvd.add_process_set(ranks)
    try:
        model = small_model()
        expected = small_model()
        rows = ranks if chosen.included() else [hvd.rank()]
        reference = make_sgd(expected.parameters())
        optimizer = wrap(model, process_set=chosen, groups=groups)
        for x, y in batches(3):
            optimizer.zero_grad()
            mse(model, mine(x), mine(y)).backward()
            clip(model)
            optimizer.step()
            reference.zero_grad()
            for r in rows:
                (mse(expected, mine(x, r), mine(y, r)) / len(rows)).backward()
            clip(expected)
            reference.step()
        assert_same_weights(model, expected)
        if chosen.included():
            assert_ranks_agree(model, chosen)
    finally:
        hvd.remove_process_set(chosen)


def test_clipping_with_a_torch_that_does_not_tell_when_a_pass_ends(monkeypatch):
    monkeypatch.setattr("horovod.torch._gradient_reducer.queue_callback", None)
    model = small_model()
    model[1].requires_grad_(False)
    expected = train_alone(model, make_sgd, batches(3), between=clip)
    optimizer = wrap(model)
    for x, y in batches(3):
        optimizer.zero_grad()
        mse(model, mine(x), mine(y)).backward()
        clip(model)
        optimizer.step()
    assert_same_weights(model, expected)


# Last: the two halves of the mismatch stay unanswered until the job ends.
@several
def test_sparse_on_one_rank_and_dense_on_another_is_refused():
    weight = torch.nn.Parameter(torch.zeros(6, 2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("mixed", weight)])
    optimizer.wait_in_backward = False
    row = torch.tensor([1])
    torch.nn.functional.embedding(row, weight, sparse=hvd.rank() == 0).sum().backward()
    with pytest.raises(RuntimeError, match=r"'mixed' is sparse on some ranks and dense on others"):
        optimizer.step()
