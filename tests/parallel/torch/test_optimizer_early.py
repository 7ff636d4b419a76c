"""Steps before gradients are reduced: what a script changed by one rank's own gradients is refused."""

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
several = pytest.mark.skipif(hvd.size() == 1, reason="needs several ranks")


def make_sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def wrap(model, **options):
    return hvd.DistributedOptimizer(
        make_sgd(model.parameters()), model.named_parameters(), **options
    )


def scaler_of(init_scale=8.0):
    return torch.amp.GradScaler("cpu", init_scale=init_scale)


def clipped(model):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def values_clipped(model):
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)


def replaced(model):
    for param in model.parameters():
        param.grad = param.grad * 2


def accumulated(model, optimizer, how):
    ((x, y),) = batches(1)
    loss = mse(model, mine(x), mine(y))
    if how == "no_sync":
        with optimizer.no_sync():
            loss.backward()
    else:
        loss.backward()


EARLY = {
    "passes": {"backward_passes_per_step": 2},
    "groups": {"backward_passes_per_step": 2, "groups": 1},
    "no_sync": {},
    "unwaited": {},
}


def early(how):
    model = small_model()
    optimizer = wrap(model, **EARLY[how])
    if how == "unwaited":
        optimizer.wait_in_backward = False
    accumulated(model, optimizer, how)
    return model, optimizer


@several
@pytest.mark.parametrize("how", EARLY)
@pytest.mark.parametrize("change", [clipped, values_clipped, replaced])
def test_gradients_changed_before_an_early_step_are_refused(how, change):
    model, optimizer = early(how)
    change(model)
    with pytest.raises(RuntimeError, match=r"is not reduced yet: .*Call optimizer.synchronize\(\)"):
        optimizer.step()
    optimizer.zero_grad()
    accumulated(model, optimizer, how)
    optimizer.synchronize()
    change(model)
    with optimizer.skip_synchronize():
        optimizer.step()
    assert_ranks_agree(model)


@several
@pytest.mark.parametrize("how", ["passes", "no_sync"])
def test_gradients_unscaled_before_an_early_step_are_refused(how):
    """One rank alone found infinite values: it would skip the step that the others take."""
    model, optimizer = early(how)
    scaler = scaler_of()
    scaler.scale(torch.ones(()))
    if hvd.rank() == 0:
        next(model.parameters()).grad.data.fill_(float("inf"))
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"GradScaler.unscale_ .*skip_synchronize\(\)"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"is not reduced yet"):
        scaler.step(optimizer)


@several
@pytest.mark.parametrize("how", ["passes", "no_sync"])
def test_unscaling_after_synchronize(how):
    model, optimizer = early(how)
    scaler = scaler_of()
    scaler.scale(torch.ones(()))
    optimizer.synchronize()
    scaler.unscale_(optimizer)
    clipped(model)
    with optimizer.skip_synchronize():
        scaler.step(optimizer)
    scaler.update()
    assert_ranks_agree(model)


@pytest.mark.parametrize("how", EARLY)
@pytest.mark.parametrize("scale", [None, 8.0])
def test_an_early_step_needs_nothing_if_nothing_happens_between(how, scale):
    model = small_model()
    expected = train_alone(model, make_sgd, batches(3))
    optimizer = wrap(model, **EARLY[how])
    optimizer.wait_in_backward = how != "unwaited"
    scaler = scaler_of(scale) if scale else torch.amp.GradScaler("cpu", enabled=False)
    for x, y in batches(3):
        optimizer.zero_grad()
        loss = scaler.scale(mse(model, mine(x), mine(y)))
        if how == "no_sync":
            with optimizer.no_sync():
                loss.backward()
        else:
            loss.backward()
        scaler.step(optimizer)
        scaler.update()
    assert_same_weights(model, expected)


@several
def test_a_change_that_each_rank_means_for_itself_comes_before_synchronize():
    model, optimizer = early("passes")
    for param in model.parameters():
        param.grad.mul_(hvd.rank())
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()
    assert_ranks_agree(model)


@several
def test_changes_between_passes_and_after_the_last_are_no_mistake():
    model = small_model()
    optimizer = wrap(model, backward_passes_per_step=2)
    for _ in range(2):
        optimizer.zero_grad()
        accumulated(model, optimizer, "passes")
        for param in model.parameters():
            param.grad.mul_(0.5)
        accumulated(model, optimizer, "passes")
        clipped(model)
        optimizer.step()
    assert_ranks_agree(model)


@several
def test_a_parameter_that_only_one_of_the_passes_used_is_not_reduced_when_it_is_clipped():
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in "ab"]
    a, b = params
    optimizer = hvd.DistributedOptimizer(
        make_sgd(params), list(zip("ab", params, strict=True)), backward_passes_per_step=2
    )
    (a + b).sum().backward()
    a.sum().backward()
    torch.nn.utils.clip_grad_norm_(params, 0.1)
    with pytest.raises(RuntimeError, match=r"the gradient of 'b' was changed"):
        optimizer.step()


@several
def test_a_closure_that_clips_too_early_is_refused():
    model = small_model()
    optimizer = wrap(model, backward_passes_per_step=2)

    def closure():
        optimizer.zero_grad()
        accumulated(model, optimizer, "passes")
        clipped(model)

    with pytest.raises(RuntimeError, match="is not reduced yet"):
        optimizer.step(closure)


@several
def test_with_a_torch_that_does_not_tell_when_backward_ends(monkeypatch):
    monkeypatch.setattr("horovod.torch._gradient_reducer.queue_callback", None)
    model, optimizer = early("passes")
    clipped(model)
    with pytest.raises(RuntimeError, match="is not reduced yet"):
        optimizer.step()
    optimizer.zero_grad()
    accumulated(model, optimizer, "passes")
    optimizer.step()
    assert_ranks_agree(model)


def with_an_unused_parameter(**options):
    """An optimizer of two parameters, of which the second is used in its first step only."""
    params = [torch.nn.Parameter(torch.ones(2)) for _ in "ab"]
    named = list(zip("ab", params, strict=True))
    return params, hvd.DistributedOptimizer(make_sgd(params), named, **options)


@several
@pytest.mark.parametrize("how", ["one pass", "two passes", "no_sync"])
@pytest.mark.parametrize("scale", [None, 8.0])
def test_old_zeros_of_a_parameter_that_is_not_used_may_be_clipped(how, scale):
    """They belong to no backward pass of this step."""
    passes = 2 if how == "two passes" else 1
    (a, b), optimizer = with_an_unused_parameter(backward_passes_per_step=passes)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    for step in range(3):
        for _ in range(passes):
            loss = (a * (hvd.rank() + 1)).sum() + (b.sum() if step == 0 else 0)
            if how == "no_sync":
                with optimizer.no_sync():
                    scaler.scale((a * 0).sum()).backward()
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_([a, b], 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=False)
    assert len(set(hvd.allgather_object(a.tolist().__repr__()))) == 1


@several
@pytest.mark.parametrize("skips", [False, True])
def test_gradients_changed_while_they_are_reduced_are_refused(skips):
    model, optimizer = early("unwaited")
    clipped(model)
    with pytest.raises(RuntimeError, match=r"while it was being reduced.*before the change"):
        if skips:
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.synchronize()


@several
def test_a_refusal_on_one_rank_is_known_to_all_if_the_batch_is_skipped():
    model, optimizer = early("passes")
    if hvd.rank() == 0:
        clipped(model)
        with pytest.raises(RuntimeError, match="is not reduced yet"):
            optimizer.step()
        optimizer.zero_grad()
        accumulated(model, optimizer, "passes")
    with pytest.raises(Exception, match=r"skip|drop|step"):
        optimizer.step()
