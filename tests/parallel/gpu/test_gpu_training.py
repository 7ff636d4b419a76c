"""Training with models on GPUs: optimizers, loss scaling, batch normalisation, states; and what a step may call."""

import copy
from contextlib import nullcontext

import pytest
import torch
from devices import (
    GpuTensor,
    current_stream,
    module_on_gpu,
    number_of_gpus,
    on_gpu,
    without_waiting,
)

import horovod.torch as hvd
from horovod.torch import _gradient_sending, _optimizer_state
from horovod.torch.elastic import TorchState

hvd.init()
SIZE, RANK = hvd.size(), hvd.rank()
DEVICE = hvd.local_rank() % number_of_gpus()
BATCH, INPUTS, OUTPUTS = 3, 5, 2
several = pytest.mark.skipif(SIZE == 1, reason="needs two ranks")


def host_model(seed=1):
    torch.manual_seed(seed)
    layers = torch.nn.Linear(INPUTS, 7), torch.nn.LayerNorm(7), torch.nn.Tanh()
    return torch.nn.Sequential(*layers, torch.nn.Linear(7, OUTPUTS, bias=False)).double()


def batches(steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(SIZE * BATCH, INPUTS, generator=generator, dtype=torch.float64)
        y = torch.randn(SIZE * BATCH, OUTPUTS, generator=generator, dtype=torch.float64)
        yield x, y


def mine(tensor):
    return on_gpu(tensor[RANK * BATCH : (RANK + 1) * BATCH], DEVICE)


def train_alone(model, steps, lr=0.1, **data):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for x, y in batches(steps, **data):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


def parameters(model):
    return [p.cpu() if isinstance(p, GpuTensor) else p.detach() for p in model.parameters()]


def assert_close(model, reference, tolerance=1e-12):
    for got, want in zip(parameters(model), parameters(reference), strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def distributed(model, lr=0.1, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **options)


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({}, 1e-12),
        ({"groups": 2}, 1e-12),
        ({"gradient_predivide_factor": 2.0}, 1e-12),
        ({"compression": hvd.Compression.fp16}, 2e-2),
    ],
    ids=["plain", "groups", "predivide", "fp16"],
)
def test_training_is_that_of_one_process(options, tolerance):
    model, reference = module_on_gpu(host_model(), DEVICE), host_model()
    optimizer = distributed(model, **options)
    for x, y in batches(4):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(mine(x)), mine(y))
        loss.backward()
        optimizer.step()
    train_alone(reference, 4)
    assert_close(model, reference, tolerance)


def test_gradients_are_reduced_when_backward_returns():
    model, reference = module_on_gpu(host_model(), DEVICE), host_model()
    optimizer = distributed(model)
    [(x, y)] = batches(1)
    torch.nn.functional.mse_loss(model(mine(x)), mine(y)).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    torch.nn.functional.mse_loss(reference(x), y).backward()
    want = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
    torch.testing.assert_close(norm.cpu(), want)
    for got, param in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(got.grad.cpu(), param.grad, rtol=1e-10, atol=1e-14)
    optimizer.zero_grad()


def test_several_passes_before_a_step():
    model, reference = module_on_gpu(host_model(), DEVICE), host_model()
    optimizer = distributed(model, backward_passes_per_step=2)
    for x, y in batches(2):
        optimizer.zero_grad()
        for _ in range(2):
            torch.nn.functional.mse_loss(model(mine(x)), mine(y)).backward()
        optimizer.step()
    alone = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for x, y in batches(2):
        alone.zero_grad()
        (2 * torch.nn.functional.mse_loss(reference(x), y)).backward()
        alone.step()
    assert_close(model, reference)


def test_parameters_that_only_some_ranks_use():
    torch.manual_seed(3)
    trunk, left, right = (module_on_gpu(torch.nn.Linear(2, 2).double(), DEVICE) for _ in range(3))
    whole = torch.nn.ModuleList([trunk, left, right])
    optimizer = distributed(whole)
    x = on_gpu(torch.ones(1, 2, dtype=torch.float64), DEVICE)
    branch = left if RANK == 0 else right
    branch(trunk(x)).sum().backward()
    assert torch.equal(left.bias.grad.cpu(), torch.full((2,), 1 / SIZE, dtype=torch.float64))
    if SIZE > 1:
        want = torch.full((2,), (SIZE - 1) / SIZE, dtype=torch.float64)
        torch.testing.assert_close(right.bias.grad.cpu(), want)
    optimizer.step()


def test_gradients_are_handed_over_in_larger_parts_than_on_the_host(monkeypatch):
    parts = []
    real = _gradient_sending.allreduce_together_

    def recorded(tensors, *others):
        parts.append([t.nbytes for t in tensors])
        return real(tensors, *others)

    monkeypatch.setattr(_gradient_sending, "allreduce_together_", recorded)
    monkeypatch.setattr(_gradient_sending, "_FIRST_GPU_BYTES", 100)
    monkeypatch.setattr(_gradient_sending, "_NEXT_GPU_BYTES", 1000)
    monkeypatch.setattr(_gradient_sending, "_host_bytes", lambda: 1)
    torch.manual_seed(2)
    model = module_on_gpu(torch.nn.Sequential(*[torch.nn.Linear(5, 5) for _ in range(20)]), DEVICE)
    optimizer = distributed(model)
    model(on_gpu(torch.ones(1, 5), DEVICE)).sum().backward()
    optimizer.step()
    if SIZE == 1:
        assert not parts
        return
    sizes = [sum(part) for part in parts]
    assert sum(sizes) == 20 * (25 + 5) * 4
    assert 100 <= sizes[0] < 200
    assert all(1000 <= size < 1100 for size in sizes[1:-1])


class Scaler(torch.amp.GradScaler):
    """PyTorch's for a GPU, which asks for a real one when it is made."""

    def __init__(self, scale):
        super().__init__("cpu", init_scale=scale, growth_interval=100)

    def _lazy_init_scale_growth_tracker(self, dev):
        super()._lazy_init_scale_growth_tracker(torch.device("cuda", DEVICE))


def test_loss_scaling():
    """An overflow on one rank skips the step on all; nothing but the scaler's own look has the host wait."""
    model, reference = module_on_gpu(host_model(), DEVICE), host_model()
    optimizer = distributed(model, lr=0.05)
    scaler = Scaler(1024.0)
    for number, (x, y) in enumerate(batches(4, seed=4)):
        inputs, targets = mine(x), mine(y)
        overflows = number == 2 and RANK == SIZE - 1
        with without_waiting("item") if number else nullcontext():
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            if overflows:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)
            scaler.step(optimizer)
            scaler.update()
    assert scaler.get_scale() == 512.0
    alone = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9)
    for number, (x, y) in enumerate(batches(4, seed=4)):
        if number != 2:
            alone.zero_grad()
            torch.nn.functional.mse_loss(reference(x), y).backward()
            alone.step()
    assert_close(model, reference, 1e-9)


def test_adasum_steps():
    model = module_on_gpu(host_model(), DEVICE)
    on_host = host_model()
    # On one host the ranks' steps are averaged where NCCL is used, and those of SGD are linear in the gradients.
    as_if = hvd.Average if hvd.nccl_built() else hvd.Adasum
    for network, place, op in (
        (model, mine, hvd.Adasum),
        (on_host, lambda t: mine(t).cpu(), as_if),
    ):
        optimizer = distributed(network, op=op)
        for x, y in batches(2):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(network(place(x)), place(y)).backward()
            optimizer.step()
    assert_close(model, on_host, 1e-9)


def test_batch_normalisation_over_all_ranks():
    generator = torch.Generator().manual_seed(5)
    whole = torch.randn(SIZE * 4, 3, 5, generator=generator, dtype=torch.float64) * 2 + 7
    plain = torch.nn.BatchNorm1d(3).double()
    sync = hvd.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
    module_on_gpu(sync, DEVICE)
    x = on_gpu(whole[RANK * 4 : RANK * 4 + 4], DEVICE).requires_grad_(True)
    x_whole = whole.clone().requires_grad_(True)
    with without_waiting():
        y = sync(x)
        (y * y * y).sum().backward()
    y_whole = plain(x_whole)
    (y_whole * y_whole * y_whole).sum().backward()
    rows = slice(RANK * 4, RANK * 4 + 4)
    torch.testing.assert_close(y.detach().cpu(), y_whole[rows].detach())
    torch.testing.assert_close(x.grad.cpu(), x_whole.grad[rows])
    torch.testing.assert_close(sync.running_mean.cpu(), plain.running_mean)
    torch.testing.assert_close(sync.running_var.cpu(), plain.running_var)


def test_a_batch_normalisation_of_one_value_is_refused():
    sync = module_on_gpu(hvd.SyncBatchNorm(3), DEVICE)
    one = on_gpu(torch.ones(1 if RANK == 0 else 0, 3), DEVICE)
    if SIZE > 1:
        with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
            sync(one)


def test_parameters_and_optimizer_state_of_the_root(monkeypatch):
    # A subclass of tensors is not sent as data.
    monkeypatch.setattr(_optimizer_state, "_is_dense", lambda v: isinstance(v, torch.Tensor))
    model = module_on_gpu(host_model(seed=RANK), DEVICE)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    assert_close(model, host_model(seed=0), 0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (RANK + 1))
    if RANK == 0:
        model(on_gpu(torch.ones(1, INPUTS, dtype=torch.float64), DEVICE)).sum().backward()
        optimizer.step()
    hvd.broadcast_parameters(model.named_parameters(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.param_groups[0]["lr"] == 0.1
    for param in model.parameters():
        state = optimizer.state[param]
        assert state["exp_avg"].device == torch.device("cuda", DEVICE)
        assert state["step"].device.type == "cpu"
        sums = hvd.allgather(state["exp_avg"].sum().reshape(1)).cpu()
        assert torch.equal(sums, sums[:1].expand(SIZE))


def test_elastic_state_is_saved_after_the_gpu_has_ended():
    model = module_on_gpu(host_model(), DEVICE)
    optimizer = distributed(model)
    state = TorchState(model=model, optimizer=optimizer, batch=0)
    losses = hvd.allreduce_(on_gpu(torch.ones(4), DEVICE), op=hvd.Sum, name="before a commit")
    state.commit()
    saved = parameters(model)
    [(x, y)] = batches(1)
    torch.nn.functional.mse_loss(model(mine(x)), mine(y)).backward()
    optimizer.step()
    assert not all(torch.equal(a, b) for a, b in zip(parameters(model), saved, strict=True))
    state.restore()
    assert all(torch.equal(a, b) for a, b in zip(parameters(model), saved, strict=True))
    assert torch.equal(losses.cpu(), torch.full((4,), float(SIZE)))


def test_replicas_are_compared():
    model = module_on_gpu(host_model(), DEVICE)
    assert hvd.check_consistency(model.named_parameters(), action="warn")
    if SIZE > 1 and RANK == 0:
        with torch.no_grad():
            model[0].weight.add_(1)
    assert hvd.check_consistency(model.named_parameters(), action="warn") == (SIZE == 1)


def test_leaving_and_beginning_again():
    hvd.allreduce_async_(on_gpu(torch.ones(1000), DEVICE), op=hvd.Sum, name="not waited for")
    hvd.barrier()
    hvd.shutdown()
    hvd.init()
    result = hvd.allreduce(on_gpu(torch.ones(3), DEVICE), op=hvd.Sum, name="of the next job")
    assert result.cpu().tolist() == [float(SIZE)] * 3
    current_stream(DEVICE).synchronize()
