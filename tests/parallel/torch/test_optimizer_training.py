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


@pytest.mark.parametrize("named", [True, False])
def test_averages_gradients(named):
    check(named=named)


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "AdamW_foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW_fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "ASGD": lambda p: torch.optim.ASGD(p),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_trains_like_in_one_process(name):
    check(OPTIMIZERS[name], tolerance=1e-9)


def test_sums_gradients():
    check(op=hvd.Sum, scale=1.0 / hvd.size())


@pytest.mark.parametrize("groups", [None, 2])
def test_predivides_gradients(groups):
    check(gradient_predivide_factor=4.0, groups=groups)


@pytest.mark.parametrize("groups", [1, 2, 3, 50])
def test_groups_of_a_number(groups):
    check(groups=groups)


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


@pytest.mark.parametrize("groups", [None, 2])
def test_fp16_compression_is_close(groups):
    check(tolerance=5e-3, compression=hvd.Compression.fp16, groups=groups)


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


@pytest.mark.parametrize("groups", [None, 2])
@pytest.mark.parametrize("passes", [2, 3])
def test_accumulates_over_backward_passes(passes, groups):
    model = small_model()
    alone = copy.deepcopy(model)
    optimizer = hvd.DistributedOptimizer(
        make_sgd(model.parameters()),
        model.named_parameters(),
        backward_passes_per_step=passes,
        groups=groups,
    )
    reference = make_sgd(alone.parameters())
    for step in range(3):
        optimizer.zero_grad()
        reference.zero_grad()
        for x, y in batches(passes, seed=step):
            (mse(model, mine(x), mine(y)) / passes).backward()
            (mse(alone, x, y) / passes).backward()
        optimizer.step()
        reference.step()
    assert_same_weights(model, alone)


def test_early_step_reduces_what_there_is():
    model = small_model()
    expected = train_alone(model, make_sgd, batches(3))
    optimizer = hvd.DistributedOptimizer(
        make_sgd(model.parameters()), model.named_parameters(), backward_passes_per_step=4
    )
    train(model, optimizer, steps=3)
    assert_same_weights(model, expected)


def test_set_backward_passes_per_step_takes_effect_at_once():
    model = small_model()
    expected = train_alone(model, make_sgd, batches(3))
    optimizer = hvd.DistributedOptimizer(
        make_sgd(model.parameters()), model.named_parameters(), backward_passes_per_step=4
    )
    optimizer.set_backward_passes_per_step(1)
    assert optimizer.backward_passes_per_step == 1
    train(
        model,
        optimizer,
        steps=3,
        between=lambda m: assert_ranks_agree(
            torch.nn.ParameterList(p.grad for p in m.parameters())
        ),
    )
    assert_same_weights(model, expected)


def test_no_sync_accumulates_locally():
    model = small_model()
    alone = copy.deepcopy(model)
    optimizer = hvd.DistributedOptimizer(make_sgd(model.parameters()), model.named_parameters())
    reference = make_sgd(alone.parameters())
    for step in range(3):
        (x1, y1), (x2, y2) = batches(2, seed=step)
        optimizer.zero_grad()
        reference.zero_grad()
        with optimizer.no_sync():
            mse(model, mine(x1), mine(y1)).backward()
        mse(model, mine(x2), mine(y2)).backward()
        optimizer.step()
        (mse(alone, x1, y1) + mse(alone, x2, y2)).backward()
        reference.step()
    assert_same_weights(model, alone)


def test_several_losses_with_their_own_backward_passes():
    """Every parameter gets its gradient in one of two passes before the step."""
    model, head = small_model(), small_model(2)
    both = torch.nn.ModuleList([model, head])
    expected = copy.deepcopy(both)
    optimizer = hvd.DistributedOptimizer(make_sgd(both.parameters()), both.named_parameters())
    reference = make_sgd(expected.parameters())
    for x, y in batches(3):
        optimizer.zero_grad()
        mse(both[0], mine(x), mine(y)).backward()
        mse(both[1], mine(x), mine(y)).backward()
        optimizer.step()
        reference.zero_grad()
        (mse(expected[0], x, y) + mse(expected[1], x, y)).backward()
        reference.step()
    assert_same_weights(both, expected)


def test_a_module_used_twice_is_reduced_once():
    model = small_model()
    square = torch.nn.Linear(5, 5).double()
    hvd.broadcast_parameters(square.state_dict(), root_rank=0)
    both = torch.nn.Sequential(square, square, model)
    expected = train_alone(both, make_sgd, batches(3))
    optimizer = hvd.DistributedOptimizer(make_sgd(both.parameters()), both.named_parameters())
    train(both, optimizer, steps=3)
    assert_same_weights(both, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_parameters(dtype):
    model = small_model(dtype=dtype)
    optimizer = hvd.DistributedOptimizer(make_sgd(model.parameters()), model.named_parameters())
    for x, y in batches(3, dtype=dtype):
        optimizer.zero_grad()
        mse(model, mine(x), mine(y)).backward()
        optimizer.step()
    assert all(p.dtype is dtype and torch.isfinite(p).all() for p in model.parameters())
    assert_ranks_agree(model)


def test_channels_last_parameters():
    def conv():
        torch.manual_seed(3)
        layers = torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Conv2d(4, 2, 3)
        return torch.nn.Sequential(*layers).double().to(memory_format=torch.channels_last)

    model, alone = conv(), conv()
    optimizer = hvd.DistributedOptimizer(make_sgd(model.parameters()), model.named_parameters())
    reference = make_sgd(alone.parameters())
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        x = torch.randn(2 * hvd.size(), 3, 8, 8, generator=generator, dtype=torch.float64)
        x = x.to(memory_format=torch.channels_last)
        optimizer.zero_grad()
        model(x[2 * hvd.rank() :][:2]).pow(2).mean().backward()
        assert model[0].weight.grad.is_contiguous(memory_format=torch.channels_last)
        optimizer.step()
        reference.zero_grad()
        alone(x).pow(2).mean().backward()
        reference.step()
    assert_same_weights(model, alone)


def test_autocast_with_bfloat16():
    model = small_model(dtype=torch.float32)
    optimizer = hvd.DistributedOptimizer(make_sgd(model.parameters()), model.named_parameters())
    for x, y in batches(3, dtype=torch.float32):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = mse(model, mine(x), mine(y))
        loss.backward()
        optimizer.step()
    assert_ranks_agree(model)


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


def test_gradient_checkpointing():
    for reentrant in (False, True):
        model = small_model()
        expected = train_alone(model, make_sgd, batches(3))
        optimizer = hvd.DistributedOptimizer(make_sgd(model.parameters()), model.named_parameters())
        for x, y in batches(3):
            optimizer.zero_grad()
            start = mine(x).clone().requires_grad_()
            out = torch.utils.checkpoint.checkpoint(model[:2], start, use_reentrant=reentrant)
            (model[2:](out) - mine(y)).pow(2).mean().backward()
            optimizer.step()
        assert_same_weights(model, expected)


def test_built_under_no_grad():
    model = small_model()
    expected = train_alone(model, make_sgd, batches(3))
    with torch.no_grad():
        optimizer = hvd.DistributedOptimizer(make_sgd(model.parameters()), model.named_parameters())
    train(model, optimizer, steps=3)
    assert_same_weights(model, expected)


def test_names_may_come_in_another_order_on_each_rank():
    model = small_model()
    expected = train_alone(model, make_sgd, batches(3))
    params = list(model.parameters())
    turned = params[hvd.rank() :] + params[: hvd.rank()]
    optimizer = hvd.DistributedOptimizer(make_sgd(turned), model.named_parameters(), groups=2)
    train(model, optimizer, steps=3)
    assert_same_weights(model, expected)


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


def test_wait_in_backward_can_be_turned_off():
    model = small_model()
    expected = train_alone(model, make_sgd, batches(3))
    optimizer = hvd.DistributedOptimizer(make_sgd(model.parameters()), model.named_parameters())
    assert optimizer.wait_in_backward
    optimizer.wait_in_backward = False
    train(model, optimizer, steps=3)
    assert_same_weights(model, expected)
