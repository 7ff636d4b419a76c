"""DistributedOptimizer beside the rest of Horovod: join, broadcasts, failures, checkpoints, wire names."""

import copy
import importlib

import pytest
import torch
from optimizer_support import (
    BATCH,
    assert_ranks_agree,
    assert_same_weights,
    batches,
    mine,
    mse,
    small_model,
    train_alone,
)

import horovod.torch as hvd
from horovod.torch import _gradient_sending
from horovod.torch.mpi_ops import _handle_map

hvd.init()
several = pytest.mark.skipif(hvd.size() == 1, reason="needs several ranks")


def make_adam(params):
    return torch.optim.Adam(params, lr=0.01)


def train(model, optimizer, data):
    for x, y in data:
        optimizer.zero_grad()
        mse(model, mine(x), mine(y)).backward()
        optimizer.step()


@pytest.mark.parametrize("groups", [None, 2])
def test_ranks_with_fewer_batches_join(groups):
    """Rank r has r + 1 batches. The ranks that are done contribute nothing; the last one gives its weights."""
    model = small_model()
    optimizer = hvd.DistributedOptimizer(
        make_adam(model.parameters()), model.named_parameters(), groups=groups
    )
    for x, y in list(batches(hvd.size()))[: hvd.rank() + 1]:
        optimizer.zero_grad()
        mse(model, mine(x), mine(y)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    last = hvd.join()
    assert 0 <= last < hvd.size()
    hvd.broadcast_parameters(model.state_dict(), root_rank=hvd.size() - 1)
    assert_ranks_agree(model)


def test_ranks_with_fewer_batches_join_at_the_end_of_every_epoch():
    """They took different numbers of steps then, and go on together."""
    model = small_model()
    optimizer = hvd.DistributedOptimizer(make_adam(model.parameters()), model.named_parameters())
    for _ in range(3):
        data = list(batches(hvd.size()))[: hvd.rank() + 1]
        train(model, optimizer, data)
        last = hvd.join()
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        assert_ranks_agree(model)


@pytest.mark.parametrize("wrap_first", [True, False])
def test_only_the_root_resumes_from_a_checkpoint(wrap_first):
    """The usual resume: rank 0 loads, the others get everything by broadcast, before or after wrapping."""
    model = small_model()
    expected = train_alone(model, make_adam, batches(4))
    first = hvd.DistributedOptimizer(make_adam(model.parameters()), model.named_parameters())
    data = list(batches(4))
    train(model, first, data[:2])
    checkpoint = copy.deepcopy({"model": model.state_dict(), "optimizer": first.state_dict()})

    model = small_model(seed=hvd.rank() + 10)
    optimizer = make_adam(model.parameters())
    if wrap_first:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    if hvd.rank() == 0:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    if not wrap_first:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    train(model, optimizer, data[2:])
    assert_same_weights(model, expected, 1e-9)


@several
def test_ranks_that_disagree_get_the_error_from_backward_and_can_go_on():
    size = 3 + (hvd.rank() == 0)
    odd = torch.nn.Parameter(torch.zeros(size))
    model = small_model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([odd, *model.parameters()], lr=0.1),
        [("odd", odd), *model.named_parameters()],
    )
    with pytest.raises(hvd.HorovodInternalError, match="odd"):
        odd.sum().backward()
    odd.grad = None
    train(model, optimizer, batches(2))
    assert_ranks_agree(model)


def record(monkeypatch):
    """Names of the gradients that were sent, one by one or together."""
    names = []
    module = importlib.import_module("horovod.torch._gradient_sending")
    announcing = importlib.import_module("horovod.common._objects")
    one, together = module.allreduce_async_, module.allreduce_together_
    announce = announcing.start_reducing_bytes

    def recorded(*args, **kwargs):
        names.append(kwargs["name"])
        return one(*args, **kwargs)

    def recorded_announcement(data, op, name, process_set):
        names.append(name)
        return announce(data, op, name, process_set)

    def recorded_together(tensors, its_names, *args):
        handles = together(tensors, its_names, *args)
        names.extend(its_names[: len(handles)])
        return handles

    monkeypatch.setattr(module, "allreduce_async_", recorded)
    monkeypatch.setattr(announcing, "start_reducing_bytes", recorded_announcement)
    monkeypatch.setattr(module, "allreduce_together_", recorded_together)
    return names


@several
@pytest.mark.parametrize("is_full", [False, True], ids=["core_left", "no_core_left"])
def test_large_gradients_leave_at_once_and_small_ones_together(is_full, monkeypatch):
    """Where the ranks leave no core over, all leave at the end of backward."""
    monkeypatch.setattr(_gradient_sending, "fills_its_host", lambda: is_full)
    sent = record(monkeypatch)
    model = torch.nn.ModuleDict(
        {
            "first": torch.nn.Linear(2, 2, bias=False),
            "large": torch.nn.Linear(2, 1 << 16, bias=False),
            "last": torch.nn.Linear(1 << 16, 1, bias=False).requires_grad_(False),
            "small": torch.nn.Linear(1, 3),
        }
    )
    optimizer = hvd.DistributedOptimizer(make_adam(model.parameters()), model.named_parameters())
    seen = []
    model["small"].weight.register_post_accumulate_grad_hook(lambda _: seen.append(list(sent)))
    model["first"].weight.register_post_accumulate_grad_hook(lambda _: seen.append(list(sent)))
    x = torch.ones(1, 2)
    for layer in model.values():
        x = layer(x)
    x.sum().backward()
    small = {"small.weight", "small.bias"}
    assert seen[0] == []
    assert set(seen[1]) == (set() if is_full else small | {"large.weight"})
    assert set(sent) == small | {"large.weight", "first.weight", "presence.first.weight"}
    optimizer.step()


@several
def test_gradients_travel_under_the_names_of_their_parameters(monkeypatch):
    names = record(monkeypatch)
    model = small_model()
    optimizer = hvd.DistributedOptimizer(make_adam(model.parameters()), model.named_parameters())
    train(model, optimizer, batches(1))
    wanted = {name for name, _ in model.named_parameters()}
    assert wanted < set(names)
    # Beside them one exchange per step: who has which gradient.
    assert [n for n in names if n not in wanted] == [f"presence.{min(wanted)}"]


@several
def test_default_names_count_groups_and_positions(monkeypatch):
    names = record(monkeypatch)
    first, second = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([{"params": [first]}, {"params": [second]}], lr=0.1)
    )
    (first.sum() + second.sum()).backward()
    optimizer.step()
    assert {"allreduce.noname.0.0", "allreduce.noname.1.0"} < set(names)


@several
def test_a_group_travels_under_the_name_of_its_first_member(monkeypatch):
    names = []
    module = importlib.import_module("horovod.torch._gradient_sending")
    original = module.grouped_allreduce_async_

    def recorded(*args, **kwargs):
        names.append(kwargs["name"])
        return original(*args, **kwargs)

    monkeypatch.setattr(module, "grouped_allreduce_async_", recorded)
    model = small_model()
    params = list(model.parameters())
    optimizer = hvd.DistributedOptimizer(
        make_adam(params), model.named_parameters(), groups=[[params[4], params[0]]]
    )
    train(model, optimizer, batches(1))
    assert names == ["3.weight"]


@several
@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.fp16])
def test_if_gradients_fail_the_others_are_there_before_it_is_said(compression):
    """Operations in flight still write into gradients, which the script may touch after the exception."""
    own = 1.0 + hvd.rank()
    sizes = {"a": 2 + hvd.rank(), "b": 4, "c": 3 + hvd.rank(), "d": 5}
    params = {name: torch.nn.Parameter(torch.zeros(size)) for name, size in sizes.items()}
    optimizer = hvd.DistributedOptimizer(
        make_adam(params.values()), params.items(), compression=compression
    )
    before = len(_handle_map)
    with pytest.raises(RuntimeError, match="Mismatched ALLREDUCE tensor shapes"):
        sum(own * p.sum() for p in params.values()).backward()
    assert len(_handle_map) == before  # nothing that nobody waited for
    mean = (1 + hvd.size()) / 2
    for name in ("b", "d"):
        assert torch.equal(params[name].grad, torch.full((sizes[name],), mean))
    optimizer.zero_grad()
    # And the ranks go on together.
    (own * (params["b"].sum() + params["d"].sum())).backward()
    assert torch.equal(params["d"].grad, torch.full((5,), mean))
    optimizer.zero_grad()


def test_batches_are_shared_out_without_overlap():
    """The helper of these tests itself."""
    ((x, _),) = batches(1)
    gathered = hvd.allgather(mine(x))
    assert gathered.shape[0] == BATCH * hvd.size()
    assert torch.equal(gathered, x)
