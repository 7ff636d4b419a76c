"""Parameters that somebody else reduces, too, are refused by name; unlikely combinations work."""

import copy
import re
import warnings

import pytest
import torch
from optimizer_support import (
    assert_ranks_agree,
    assert_same_weights,
    batches,
    mine,
    mse,
    small_model,
)

import horovod.torch as hvd

hvd.init()
SIZE = hvd.size()
several = pytest.mark.skipif(SIZE == 1, reason="needs several ranks")


def make_sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


@pytest.fixture
def alone_in_torch_distributed(tmp_path):
    """A group of one: what is refused does not depend on who else is in it."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def test_a_model_in_ddp_is_refused(alone_in_torch_distributed):
    model = torch.nn.parallel.DistributedDataParallel(small_model())
    with pytest.raises(
        ValueError, match=r"'module.0.weight'.*DistributedDataParallel.*wrong gradients"
    ):
        hvd.DistributedOptimizer(make_sgd(model.parameters()), model.named_parameters())
    with pytest.raises(ValueError, match="DistributedDataParallel"):
        hvd.DistributedOptimizer(make_sgd(model.parameters()), op=hvd.Adasum)


@several
def test_a_model_put_into_ddp_later_is_refused(alone_in_torch_distributed):
    model = small_model()
    optimizer = hvd.DistributedOptimizer(make_sgd(model.parameters()), model.named_parameters())
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    ((x, y),) = batches(1)
    with pytest.raises(ValueError, match="belongs to a model in DistributedDataParallel"):
        mse(wrapped, mine(x), mine(y)).backward()
    optimizer.zero_grad()


def fully_sharded(kind, model):
    """The model after FSDP, and the name of its first parameter."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    if kind == "fully_shard":
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        return model, "0.weight"
    keeps = kind == "original parameters"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one rank has nothing to shard
        wrapped = FullyShardedDataParallel(
            model, use_orig_params=keeps, device_id=torch.device("cpu")
        )
    return wrapped, "_fsdp_wrapped_module." + ("0.weight" if keeps else "_flat_param")


FSDP_REMEDY = {
    "fully_shard": r"is a DTensor \(FSDP, .*with the plain torch optimizer, without Horovod",
    "flat parameter": "belongs to a model in FullyShardedDataParallel.*leave FullyShardedDataParallel out",
    "original parameters": "belongs to a model in FullyShardedDataParallel.*leave FullyShardedDataParallel out",
}


@pytest.mark.parametrize("kind", FSDP_REMEDY)
def test_a_model_in_fsdp_is_refused(alone_in_torch_distributed, kind):
    model, first = fully_sharded(kind, small_model())
    text = f"the parameter '{re.escape(first)}' {FSDP_REMEDY[kind]}"
    for op in (hvd.Average, hvd.Adasum):
        with pytest.raises(ValueError, match=text):
            hvd.DistributedOptimizer(make_sgd(model.parameters()), model.named_parameters(), op=op)
    with pytest.raises(ValueError, match=f"'allreduce.noname.0.0' {FSDP_REMEDY[kind]}"):
        hvd.DistributedOptimizer(make_sgd(model.parameters()))
    # With the plain optimizer, beside Horovod, it trains.
    optimizer = make_sgd(model.parameters())
    ((x, y),) = batches(1)
    mse(model, mine(x), mine(y)).backward()
    optimizer.step()


@several
def test_a_model_put_into_fsdp_later_is_refused(alone_in_torch_distributed):
    """FSDP puts its gradients into `.grad` where no hook sees them."""
    model = small_model()
    optimizer = hvd.DistributedOptimizer(make_sgd(model.parameters()), model.named_parameters())
    wrapped, _ = fully_sharded("original parameters", model)
    ((x, y),) = batches(1)
    mse(wrapped, mine(x), mine(y)).backward()
    with pytest.raises(ValueError, match="belongs to a model in FullyShardedDataParallel"):
        optimizer.step()


def test_sharded_parameters_are_refused(alone_in_torch_distributed):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    param = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh))
    with pytest.raises(ValueError, match=r"'p' is a DTensor.*plain torch optimizer"):
        hvd.DistributedOptimizer(make_sgd([param]), [("p", param)])
    for operation in (hvd.allreduce, hvd.allreduce_, hvd.allgather):
        with pytest.raises(ValueError, match=r"DTensor.*to_local\(\)"):
            operation(param.detach())
    with pytest.raises(ValueError, match="DTensor"):
        hvd.broadcast_parameters({"p": param}, root_rank=0)


@several
def test_a_parameter_in_two_optimizers_is_refused():
    model, head = small_model(), small_model(2)
    ((x, y),) = batches(1)
    first = hvd.DistributedOptimizer(make_sgd(model.parameters()), model.named_parameters("a"))
    second = hvd.DistributedOptimizer(
        make_sgd([*head.parameters(), model[0].weight]),
        [*head.named_parameters("b"), ("shared", model[0].weight)],
    )
    with pytest.raises(ValueError, match="belongs to another distributed optimizer"):
        (mse(model, mine(x), mine(y)) + mse(head, mine(x), mine(y))).backward()
    first.zero_grad()
    second.zero_grad()
    del second
    mse(model, mine(x), mine(y)).backward()
    first.step()
    assert_ranks_agree(model)


def test_an_optimizer_made_anew_for_the_same_model_replaces_the_old_one():
    model = small_model()
    for x, y in batches(3):
        optimizer = hvd.DistributedOptimizer(make_sgd(model.parameters()), model.named_parameters())
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        mse(model, mine(x), mine(y)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_ranks_agree(model)


@pytest.mark.parametrize("together", [False, True])
def test_two_models_with_equal_names(together):
    """One after the other they work, also the last gradients of one pass."""
    models = [small_model(), small_model(2)]
    expected = copy.deepcopy(models)
    optimizers = [
        hvd.DistributedOptimizer(make_sgd(m.parameters()), m.named_parameters()) for m in models
    ]
    references = [make_sgd(m.parameters()) for m in expected]
    for x, y in batches(2):
        if together:
            for optimizer in optimizers:
                optimizer.zero_grad()
            sum(mse(m, mine(x), mine(y)) for m in models).backward()
        for model, optimizer in zip(models, optimizers, strict=True):
            if together:
                break
            optimizer.zero_grad()
            mse(model, mine(x), mine(y)).backward()
        for optimizer in optimizers:
            optimizer.step()
        for model, reference in zip(expected, references, strict=True):
            reference.zero_grad()
            mse(model, x, y).backward()
            reference.step()
    for model, alone in zip(models, expected, strict=True):
        assert_same_weights(model, alone)


def test_a_parameter_frozen_on_some_ranks_only():
    """It gets what the others send, so the ranks stay alike."""
    model = small_model()
    optimizer = hvd.DistributedOptimizer(make_sgd(model.parameters()), model.named_parameters())
    if hvd.rank() == 0 and SIZE > 1:
        model[3].requires_grad_(False)
    for x, y in batches(3):
        optimizer.zero_grad()
        mse(model, mine(x), mine(y)).backward()
        optimizer.step()
    model.requires_grad_(True)
    assert_ranks_agree(model)
