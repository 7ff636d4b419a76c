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


# ---- parameters without a gradient ---------------------------------------------------------------------------------


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


def test_gradients_set_by_hand_are_reduced():
    param = torch.nn.Parameter(torch.zeros(4))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), [("p", param)])
    param.grad = torch.full((4,), float(hvd.rank()))
    optimizer.step()
    assert torch.allclose(param.detach(), torch.full((4,), -(hvd.size() - 1) / 2))


# ---- freezing and thawing ------------------------------------------------------------------------------------------


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


# ---- loss scaling --------------------------------------------------------------------------------------------------


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


def test_an_optimizer_of_nothing_is_taken_as_torch_takes_it():
    empty = torch.optim.SGD([{"params": []}], lr=0.1)
    others = hvd.add_process_set([0]) if hvd.size() > 1 else hvd.global_process_set
    for groups in (None, 2):
        for process_set in (others, hvd.global_process_set):
            optimizer = hvd.DistributedOptimizer(empty, groups=groups, process_set=process_set)
            optimizer.step()


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
