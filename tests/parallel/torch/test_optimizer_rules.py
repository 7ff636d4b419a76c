"""Refusals and warnings of DistributedOptimizer, and the attributes it keeps of the optimizer it wraps."""

import copy
import gc
import io
import pickle
import warnings
import weakref

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
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def wrapped(model, **options):
    return hvd.DistributedOptimizer(
        make_sgd(model.parameters()), model.named_parameters(), **options
    )


def backward(model, optimizer=None, seed=0):
    ((x, y),) = batches(1, seed=seed)
    if optimizer is not None:
        optimizer.zero_grad()
    mse(model, mine(x), mine(y)).backward()


# ---- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (
            {"gradient_predivide_factor": 2.0, "op": hvd.Sum},
            ValueError,
            "gradient_predivide_factor",
        ),
        ({"backward_passes_per_step": 0}, ValueError, "must be > 0"),
        ({"backward_passes_per_step": -1}, ValueError, "must be > 0"),
        ({"groups": 0}, ValueError, "non-negative integer or a list of list of torch.Tensor"),
        ({"groups": -1}, ValueError, "non-negative integer or a list of list of torch.Tensor"),
        ({"groups": ()}, TypeError, "list of list of torch.Tensor"),
        ({"groups": [[1]]}, ValueError, "must consist of torch.Tensor"),
    ],
)
def test_bad_options(options, error, text):
    with pytest.raises(error, match=text):
        wrapped(small_model(), **options)


class Around:
    """As LARC of apex: a class of its own with an optimizer inside."""

    def __init__(self, optimizer):
        self.optim = optimizer
        self.param_groups = optimizer.param_groups

    def step(self):
        self.optim.step()


def test_what_is_around_an_optimizer_is_refused_with_the_way_out():
    model = small_model()
    text = r"takes a torch.optim.Optimizer, not Around. .* its .optim, .*Around\(hvd.DistributedOptimizer"
    with pytest.raises(TypeError, match=text):
        hvd.DistributedOptimizer(Around(make_sgd(model.parameters())))
    with pytest.raises(TypeError, match=r"not list\. Pass one, such as torch.optim.SGD"):
        hvd.DistributedOptimizer(list(model.parameters()))
    expected = train_alone(model, make_sgd, batches(1))
    around = Around(wrapped(model))
    backward(model)
    around.step()
    assert_same_weights(model, expected)


def test_a_parameter_in_two_groups():
    model = small_model()
    weight = model[0].weight
    with pytest.raises(ValueError, match="can only appear once"):
        wrapped(model, groups=[[weight], [weight]])


def test_named_parameters_that_are_no_tuples():
    model = small_model()
    for names in ([1, 2], dict(model.named_parameters())):
        with pytest.raises(ValueError, match="sequence of tuples"):
            hvd.DistributedOptimizer(make_sgd(model.parameters()), names)


def test_duplicate_names_are_listed():
    model = small_model()
    names = [("twice", p) for p in model.parameters()]
    with pytest.raises(ValueError, match=r"must be unique.*twice"):
        hvd.DistributedOptimizer(make_sgd(model.parameters()), names)


def test_parameters_without_a_name():
    model = small_model()
    names = list(model.named_parameters())
    with pytest.raises(ValueError, match=f"were not named.*{id(names[-1][1])}"):
        hvd.DistributedOptimizer(make_sgd(model.parameters()), names[:-1])


def test_more_names_than_parameters_and_two_names_for_one():
    model = small_model()
    names = [*model.named_parameters(), ("alias", model[0].weight)]
    optimizer = hvd.DistributedOptimizer(make_sgd([model[0].weight]), names)
    backward(model)
    optimizer.step()


def test_find_duplicates():
    optimizer = wrapped(small_model())
    assert set(optimizer.find_duplicates(["a", "b", "a"])) == {"a"}


@pytest.mark.parametrize("options", [{}, {"set_to_none": True}, {"set_to_none": False}])
def test_zero_grad_takes_the_arguments_of_torch(options):
    model = small_model()
    optimizer = wrapped(model)
    backward(model)
    optimizer.step()
    optimizer.zero_grad(**options)
    if options.get("set_to_none", True):
        assert all(p.grad is None for p in model.parameters())
    else:
        assert all(not p.grad.any() for p in model.parameters())


def test_step_after_synchronize_warns_and_does_not_reduce_a_sum_twice():
    for op in (hvd.Average, hvd.Sum):
        param = torch.nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([param], lr=1.0), [("p", param)], op=op
        )
        param.sum().backward()
        optimizer.synchronize()
        with pytest.warns(
            UserWarning, match=r"called without optimizer.skip_synchronize\(\)"
        ) as seen:
            optimizer.step()
        assert len(seen) == 1
        assert seen[0].filename == __file__
        factor = hvd.size() if op == hvd.Sum else 1
        assert torch.equal(param.detach(), torch.full((2,), -float(factor)))


def test_a_usual_step_does_not_warn():
    model = small_model()
    optimizer = wrapped(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            backward(model, optimizer)
            optimizer.step()
            backward(model, optimizer)
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()


@several
def test_gradients_with_a_graph_are_refused():
    model = small_model()
    optimizer = wrapped(model)
    ((x, y),) = batches(1)
    loss = mse(model, mine(x), mine(y))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about reference cycles
        with pytest.raises(AssertionError, match="create_graph=True"):
            loss.backward(create_graph=True)
    model.zero_grad()
    optimizer.zero_grad()


# ---- what is kept --------------------------------------------------------------------------------------------------


def test_the_class_is_a_subclass_with_the_same_name():
    inner = make_sgd(small_model().parameters())
    optimizer = hvd.DistributedOptimizer(inner)
    assert isinstance(optimizer, torch.optim.SGD)
    assert type(optimizer) is not torch.optim.SGD
    assert type(optimizer).__name__ == "SGD"
    assert type(optimizer).__module__ == "horovod.torch.optimizer"
    assert type(inner) is torch.optim.SGD


def test_public_attributes():
    optimizer = wrapped(
        small_model(),
        backward_passes_per_step=3,
        gradient_predivide_factor=2.0,
        sparse_as_dense=True,
    )
    assert optimizer.backward_passes_per_step == 3
    assert optimizer.op == hvd.Average
    assert optimizer.gradient_predivide_factor == 2.0
    assert optimizer.sparse_as_dense is True
    assert optimizer.process_set is hvd.global_process_set


def test_groups_and_state_are_shared_with_the_original():
    model = small_model()
    inner = make_sgd(model.parameters())
    backward(model)
    inner.step()
    buffer = inner.state[model[0].weight]["momentum_buffer"]
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
    assert optimizer.param_groups[0] is inner.param_groups[0]
    assert optimizer.state[model[0].weight]["momentum_buffer"] is buffer
    inner.param_groups[0]["lr"] = 0.5
    assert optimizer.param_groups[0]["lr"] == 0.5


class Custom(torch.optim.Optimizer):
    """Needs an argument that is not in the groups, and has attributes of its own."""

    def __init__(self, params, factor):
        super().__init__(params, {"lr": 1.0})
        self.factor = factor
        self.calls = []

    def step(self, closure=None, *, note="none"):
        self.calls.append(note)
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p -= group["lr"] * self.factor * p.grad
        return self.factor


def test_a_custom_optimizer_keeps_its_attributes_and_arguments():
    param = torch.nn.Parameter(torch.zeros(2))
    inner = Custom([param], factor=3.0)
    optimizer = hvd.DistributedOptimizer(inner, [("p", param)])
    (param * (hvd.rank() + 1)).sum().backward()
    assert optimizer.step(note="mine") == 3.0
    assert optimizer.calls == ["mine"]
    assert torch.allclose(param.detach(), torch.full((2,), -3.0 * (hvd.size() + 1) / 2))


def test_defaults_are_kept():
    inner = torch.optim.AdamW(small_model().parameters(), lr=0.123, betas=(0.5, 0.6))
    optimizer = hvd.DistributedOptimizer(inner)
    assert optimizer.defaults["lr"] == 0.123
    assert optimizer.defaults["betas"] == (0.5, 0.6)


@pytest.mark.parametrize("fused", [False, True])
def test_fused_optimizers_tell_the_scaler(fused):
    inner = torch.optim.AdamW(small_model(dtype=torch.float32).parameters(), fused=fused)
    optimizer = hvd.DistributedOptimizer(inner)
    assert bool(getattr(optimizer, "_step_supports_amp_scaling", False)) is fused


def test_step_hooks_fire_once_and_after_the_reduction():
    param = torch.nn.Parameter(torch.zeros(2))
    inner = make_sgd([param])
    seen = []

    def note(word):
        return lambda opt, args, kwargs: seen.append((word, opt, param.grad[0].item()))

    inner.register_step_pre_hook(note("before wrapping"))
    optimizer = hvd.DistributedOptimizer(inner, [("p", param)])
    optimizer.register_step_pre_hook(note("pre"))
    optimizer.register_step_post_hook(note("post"))
    (param * hvd.rank()).sum().backward()
    optimizer.step()
    mean = (hvd.size() - 1) / 2
    assert [(w, g) for w, _, g in seen] == [
        ("before wrapping", mean),
        ("pre", mean),
        ("post", mean),
    ]
    assert all(opt is optimizer for _, opt, _ in seen)


def test_state_dict_hooks_are_kept():
    inner = make_sgd(small_model().parameters())
    seen = []
    inner.register_state_dict_pre_hook(lambda opt: seen.append("save"))
    optimizer = hvd.DistributedOptimizer(inner)
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["save"]


@pytest.mark.parametrize("built", ["before", "on the original", "after"])
def test_schedulers_move_the_rate_without_warnings(built):
    model = small_model()
    inner = make_sgd(model.parameters())

    def schedule(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = schedule(inner) if built == "before" else None
        optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
        scheduler = scheduler or schedule(inner if built == "on the original" else optimizer)
        for step in range(3):
            backward(model, optimizer)
            optimizer.step()
            scheduler.step()
            assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5 ** (step + 1)
    assert_ranks_agree(model)


def test_a_scheduler_on_the_original_survives_load_state_dict():
    model = small_model()
    inner = make_sgd(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05


# ---- load_state_dict, copies, pickles ------------------------------------------------------------------------------


def test_load_state_dict_restores_and_begins_a_new_cycle():
    model = small_model()
    optimizer = wrapped(model)
    backward(model, optimizer)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    backward(model, optimizer, seed=5)
    optimizer.load_state_dict(copy.deepcopy(saved))
    optimizer.zero_grad()  # nothing is pending any more
    assert torch.equal(
        optimizer.state[model[0].weight]["momentum_buffer"], saved["state"][0]["momentum_buffer"]
    )
    expected = copy.deepcopy(model)
    reference = make_sgd(expected.parameters())
    reference.load_state_dict(copy.deepcopy(saved))
    backward(model, seed=2)
    optimizer.step()
    ((x, y),) = batches(1, seed=2)
    mse(expected, x, y).backward()
    reference.step()
    assert_same_weights(model, expected)


def test_a_deep_copy_of_model_and_optimizer_trains_on_its_own():
    model = small_model()
    optimizer = wrapped(model, groups=2)
    backward(model, optimizer)
    optimizer.step()
    weights = copy.deepcopy(model)
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    assert isinstance(twin_optimizer, torch.optim.SGD)
    assert twin_optimizer.process_set is hvd.global_process_set
    for seed in (1, 2):
        backward(twin, twin_optimizer, seed=seed)
        twin_optimizer.step()
    assert_same_weights(model, weights, 0)
    assert_ranks_agree(twin)
    for seed in (1, 2):
        backward(model, optimizer, seed=seed)
        optimizer.step()
    assert_same_weights(model, twin, 0)


def test_pickled_optimizers_come_back_working():
    model = small_model()
    optimizer = wrapped(model)
    backward(model, optimizer)
    optimizer.step()
    file = io.BytesIO()
    torch.save((model, optimizer), file)
    file.seek(0)
    for copied, twin in (
        pickle.loads(pickle.dumps((model, optimizer))),
        torch.load(file, weights_only=False),
    ):
        assert isinstance(twin, torch.optim.SGD)
        assert twin.process_set is hvd.global_process_set
        backward(copied, twin, seed=1)
        twin.step()
        assert_ranks_agree(copied)


def test_a_scheduler_can_be_copied_with_its_optimizer():
    model = small_model()
    optimizer = wrapped(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.step()
    twin = copy.deepcopy(scheduler)
    twin.optimizer.step()
    twin.step()
    assert twin.optimizer.param_groups[0]["lr"] == 0.05
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_model_can_still_be_copied_and_saved():
    model = small_model()
    optimizer = wrapped(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        twin = copy.deepcopy(model)
        torch.save(model, io.BytesIO())
    backward(twin)
    backward(twin)  # not hooked: no guard, no reduction
    backward(model)
    optimizer.step()


# ---- lifetime ------------------------------------------------------------------------------------------------------


def test_hooks_go_with_the_optimizer():
    model = small_model()
    optimizer = wrapped(model)
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    backward(model)
    backward(model)


def test_wrapping_again_takes_over():
    model = small_model()
    expected = train_alone(model, make_sgd, batches(2))
    first = wrapped(model)
    second = hvd.DistributedOptimizer(first, model.named_parameters())
    assert type(second).__mro__.count(torch.optim.SGD) == 1
    for x, y in batches(2):
        second.zero_grad()
        mse(model, mine(x), mine(y)).backward()
        second.step()
    assert_same_weights(model, expected)


def test_not_initialized_is_said():
    """`DistributedOptimizer` needs to know the number of ranks."""
    hvd.shutdown()
    try:
        with pytest.raises(ValueError, match="has not been initialized"):
            wrapped(small_model())
    finally:
        hvd.init()
