"""Training with DistributedOptimizer equals training in one process on the concatenated batch."""

import copy

import pytest
import torch
from optimizer_support import (
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


def make_sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01)


def train(model, optimizer, steps=4, scale=1.0, between=lambda model: None):
    for x, y in batches(steps):
        optimizer.zero_grad()
        (mse(model, mine(x), mine(y)) * scale).backward()
        between(model)
        optimizer.step()


def check(make_optimizer=make_sgd, tolerance=1e-12, scale=1.0, named=True, **options):
    """Train with `options` on all ranks; compare with one process that saw everything."""
    model = small_model()
    expected = train_alone(model, make_optimizer, batches(4))
    names = model.named_parameters() if named else None
    optimizer = hvd.DistributedOptimizer(make_optimizer(model.parameters()), names, **options)
    train(model, optimizer, scale=scale)
    assert_same_weights(model, expected, tolerance)
    assert_ranks_agree(model)


def test_groups_of_lists_leave_the_rest_alone():
    model = small_model()
    expected = train_alone(model, make_sgd, batches(4))
    params = list(model.parameters())
    optimizer = hvd.DistributedOptimizer(
        make_sgd(params), model.named_parameters(), groups=[[params[4], params[0]], [params[2]], []]
    )
    train(model, optimizer)
    assert_same_weights(model, expected)


def test_num_groups_still_works_with_a_warning():
    with pytest.warns(DeprecationWarning, match="num_groups"):
        check(num_groups=2)


def test_compression_by_an_object_of_the_user():
    class Halving:
        seen = 0

        def compress(self, tensor):
            self.seen += 1
            return tensor.flatten() / 2, tensor.shape

        def decompress(self, tensor, ctx):
            return (tensor * 2).reshape(ctx)

    compression = Halving()
    check(compression=compression)
    assert (compression.seen > 0) == (hvd.size() > 1)


@pytest.mark.parametrize("op", [hvd.Min, hvd.Max, hvd.Product])
def test_other_reductions_act_on_the_gradients(op):
    param = torch.nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), [("p", param)], op=op)
    (param * (hvd.rank() + 1)).sum().backward()
    optimizer.step()
    values = torch.arange(1, hvd.size() + 1, dtype=torch.float32)
    expected = {hvd.Min: values.min(), hvd.Max: values.max(), hvd.Product: values.prod()}[op]
    assert torch.equal(param.detach(), -expected.expand(3))


def test_models_compiled_by_torch_train_alike():
    """Names taken from the compiled module on some ranks and from the plain one on others still pair up."""
    model = small_model()
    expected = train_alone(model, make_sgd, batches(3))
    compiled = torch.compile(model, backend="aot_eager")
    source = compiled if hvd.rank() % 2 == 0 else model
    optimizer = hvd.DistributedOptimizer(make_sgd(model.parameters()), source.named_parameters())
    for x, y in batches(3):
        optimizer.zero_grad()
        mse(compiled, mine(x), mine(y)).backward()
        optimizer.step()
    assert_same_weights(model, expected, 1e-10)


def test_lbfgs_evaluates_its_closure_on_all_data():
    def make_lbfgs(params):
        return torch.optim.LBFGS(params, lr=0.5, max_iter=6, line_search_fn="strong_wolfe")

    def run(model, optimizer, rows):
        for x, y in batches(2):

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = mse(model, rows(x), rows(y))
                loss.backward()
                return loss

            optimizer.step(closure)

    model = small_model()
    alone = copy.deepcopy(model)
    run(alone, make_lbfgs(alone.parameters()), lambda rows: rows)
    optimizer = hvd.DistributedOptimizer(make_lbfgs(model.parameters()), model.named_parameters())
    run(model, optimizer, mine)
    assert_same_weights(model, alone, 1e-6)
    assert_ranks_agree(model)


def test_a_closure_is_evaluated_with_reduced_gradients():
    model = small_model()
    expected = train_alone(model, make_sgd, batches(3))
    optimizer = hvd.DistributedOptimizer(make_sgd(model.parameters()), model.named_parameters())
    for x, y in batches(3):
        with torch.no_grad():
            before = mse(model, mine(x), mine(y))

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = mse(model, mine(x), mine(y))
            loss.backward()
            return loss

        assert torch.equal(optimizer.step(closure).detach(), before)
    assert_same_weights(model, expected)
