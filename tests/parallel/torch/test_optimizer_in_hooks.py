"""Steps that the script's own hooks take inside of `backward()`, so that no gradient need be kept till its end."""

import pytest
import torch
from optimizer_support import assert_same_weights, batches, mine, mse, small_model, train_alone

import horovod.torch as hvd

hvd.init()


def make_sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def optimizers_of(model, *, named=True, wrap_last=False, hook=None, **options):
    """One optimizer for each parameter, and a hook of each parameter that is given its optimizer."""
    found = {}
    for name, param in model.named_parameters():
        if wrap_last:
            param.register_post_accumulate_grad_hook(lambda p: hook(found[p]))
        names = [(name, param)] if named else None
        found[param] = hvd.DistributedOptimizer(make_sgd([param]), names, **options)
        if not wrap_last:
            param.register_post_accumulate_grad_hook(lambda p: hook(found[p]))
    return found


def step_and_clear(optimizer):
    optimizer.step()
    optimizer.zero_grad()


def step_and_zero(optimizer):
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def step_only(optimizer):
    optimizer.step()


def synchronize_and_step(optimizer):
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("wrap_last", [False, True], ids=["hooked last", "hooked first"])
@pytest.mark.parametrize(
    ("hook", "options"),
    [
        (step_and_clear, {}),
        (step_and_clear, {"named": False}),
        (step_and_clear, {"compression": hvd.Compression.none, "groups": 1}),
        (step_and_zero, {}),
        (step_only, {}),
        (synchronize_and_step, {}),
    ],
    ids=["clear", "unnamed", "groups", "zero", "step only", "synchronize"],
)
def test_an_optimizer_per_parameter_steps_within_backward(hook, options, wrap_last):
    model = small_model()
    expected = train_alone(model, make_sgd, batches(3))
    found = optimizers_of(model, hook=hook, wrap_last=wrap_last, **options)
    for x, y in batches(3):
        mse(model, mine(x), mine(y)).backward()
        if hook is step_only:
            for optimizer in found.values():
                optimizer.zero_grad()
        elif hook is not step_and_zero:
            assert all(param.grad is None for param in model.parameters())
    assert_same_weights(model, expected)


def test_what_a_hook_has_sent_is_not_sent_again_after_it():
    """A second sum of a gradient would be larger by the number of ranks."""
    model = small_model()
    found = optimizers_of(model, hook=lambda optimizer: optimizer.synchronize(), op=hvd.Sum)
    [(x, y)] = batches(1)
    mse(model, mine(x), mine(y)).backward()
    want = small_model()
    (mse(want, x, y) * hvd.size()).backward()
    for param, other in zip(model.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(param.grad, other.grad, rtol=1e-12, atol=1e-12)
    for optimizer in found.values():
        with optimizer.skip_synchronize():
            optimizer.step()


def test_a_layers_optimizer_steps_at_its_last_parameter():
    model = small_model()
    expected = train_alone(model, make_sgd, batches(3))
    for prefix, layer in model.named_children():
        params = list(layer.named_parameters(prefix))
        if not params:
            continue
        optimizer = hvd.DistributedOptimizer(make_sgd(layer.parameters()), params)
        waiting = {param for _, param in params}

        def arrived(param, optimizer=optimizer, waiting=waiting):
            waiting.remove(param)
            if not waiting:
                waiting.update(optimizer.param_groups[0]["params"])
                step_and_clear(optimizer)

        for _, param in params:
            param.register_post_accumulate_grad_hook(arrived)
    for x, y in batches(3):
        mse(model, mine(x), mine(y)).backward()
    assert_same_weights(model, expected)
