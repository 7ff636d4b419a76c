"""Parameters that a script puts into the groups of a wrapped optimizer, in place of others or after them."""

import copy

import pytest
import torch

import horovod.torch as hvd
from horovod.torch._group_changes import changed_parameters

hvd.init()
SIZE, RANK = hvd.size(), hvd.rank()
several = pytest.mark.skipif(SIZE == 1, reason="needs several ranks")

# The mean of the ranks' factors (rank + 1).
MEAN = (SIZE + 1) / 2


def parameter(value, *shape):
    return torch.nn.Parameter(torch.full(shape or (3,), float(value)))


def loss(params, rank):
    """Its gradients depend on the parameters and on the rank."""
    return sum((rank + 1.0) * (p * (i + 1) + p.pow(2) / 2).sum() for i, p in enumerate(params))


def step(optimizer, params):
    optimizer.zero_grad()
    loss(params, RANK).backward()
    optimizer.step()


def replace_first(optimizer, params):
    """As trainers do that densify points: another size, and the state is carried over."""
    group = optimizer.param_groups[0]
    old = group["params"][0]
    new = torch.nn.Parameter(torch.cat([old.detach(), torch.ones(2)]))
    state = optimizer.state.pop(old, None)
    if state:
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = torch.cat([state[key], torch.zeros(2)])
        optimizer.state[new] = state
    group["params"][0] = params[0] = new


def append(optimizer, params):
    new = parameter(0.5, 2, 2)
    optimizer.param_groups[0]["params"].append(new)
    params.append(new)


def extend(optimizer, params):
    new = [parameter(0.25), parameter(0.75, 4)]
    optimizer.param_groups[0]["params"].extend(new)
    params.extend(new)


def other_list(optimizer, params):
    """The same parameters but the second, turned round, and a new one."""
    new = parameter(2.0, 1)
    del params[1]
    params[:] = [*reversed(params), new]
    optimizer.param_groups[0]["params"] = list(params)


def remove(optimizer, params):
    del params[1]
    del optimizer.param_groups[0]["params"][1]


def group_too(optimizer, params):
    append(optimizer, params)
    new = parameter(0.1, 5)
    optimizer.add_param_group({"params": [new], "lr": 0.02})
    params.append(new)
    replace_first(optimizer, params)


CHANGES = [replace_first, append, extend, other_list, remove, group_too]


def train(change, is_early, options=None):
    """Six steps, of which two begin with a change; with options distributed, else in one process."""
    params = [parameter(i + 1) for i in range(3)]
    optimizer = torch.optim.Adam([*params], lr=0.01)
    if options is not None:
        named = [(f"p{i}", p) for i, p in enumerate(params)]
        optimizer = hvd.DistributedOptimizer(optimizer, named, **options)
    for number in range(6):
        if number in (2, 4) and is_early:
            change(optimizer, params)
        optimizer.zero_grad()
        if number in (2, 4) and not is_early:
            change(optimizer, params)
        if options is None:
            (sum(loss(params, rank) for rank in range(SIZE)) / SIZE).backward()
        else:
            loss(params, RANK).backward()
        optimizer.step()
    return params


@pytest.mark.parametrize("is_early", [True, False])
@pytest.mark.parametrize("options", [{}, {"groups": 1}], ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_changed_groups_train_as_in_one_process(change, options, is_early):
    for got, want in zip(train(change, is_early, options), train(change, is_early), strict=True):
        torch.testing.assert_close(got, want)


@several
@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
@pytest.mark.parametrize("change", CHANGES)
def test_replicas_stay_equal_when_groups_change_at_any_place(change, op):
    for place in range(4):
        params = [parameter(i + 1) for i in range(3)]
        optimizer = hvd.DistributedOptimizer(torch.optim.Adam([*params], lr=0.01), op=op)
        for number in range(5):
            here = number in (1, 3)
            if here and place == 0:
                change(optimizer, params)
            optimizer.zero_grad()
            if here and place == 1:
                change(optimizer, params)
            loss(params, RANK).backward()
            if here and place == 2:
                change(optimizer, params)
            optimizer.step()
            if here and place == 3:
                change(optimizer, params)
        flat = torch.cat([param.detach().flatten() for param in params])
        for row in hvd.allgather(flat[None]):
            assert torch.equal(row, flat), f"place {place}"


def test_clipping_sees_reduced_gradients_of_a_parameter_that_was_replaced():
    params = [parameter(1.0), parameter(2.0)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([*params], lr=0.1))
    step(optimizer, params)
    params[0] = optimizer.param_groups[0]["params"][0] = parameter(3.0)
    optimizer.zero_grad()
    loss(params, RANK).backward()
    assert torch.equal(params[0].grad, torch.full((3,), 4.0 * MEAN))


def test_copies_are_made_of_an_optimizer_whose_groups_were_changed():
    params = [parameter(1.0)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([*params], lr=0.1))
    append(optimizer, params)
    copied = copy.deepcopy(optimizer)
    assert len(copied.param_groups[0]["params"]) == 2


def test_a_set_has_no_order():
    params = [parameter(1.0)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([*params], lr=0.1))
    optimizer.param_groups[0]["params"] = {parameter(1.0), parameter(2.0)}
    with pytest.raises(TypeError, match=r"group 0 are in a set. Their order pairs them"):
        optimizer.step()


@several
def test_another_order_on_some_rank_is_an_error():
    params = [parameter(1.0)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([*params], lr=0.1))
    step(optimizer, params)
    new = [parameter(1.0, 2), parameter(1.0, 5)]
    optimizer.param_groups[0]["params"].extend(new if RANK == 0 else reversed(new))
    params += new
    with pytest.raises((RuntimeError, hvd.HorovodInternalError)):
        step(optimizer, params)


def test_names_stay_different_after_parameters_have_moved():
    a, b, c, new, newer = (parameter(1.0) for _ in range(5))
    names = tuple(f"allreduce.noname.0.{number}" for number in (0, 2, 1))
    changes = changed_parameters([[a, c, b]], (names,), [[c, new, newer]], {})
    assert len(set(changes.names[0])) == 3
