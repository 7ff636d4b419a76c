"""`hvd.Checkpoint`, `hvd.check_finite` and `hvd.global_gradient_norm` with models of PyTorch."""

import math

import pytest
import torch

import horovod.torch as hvd

hvd.init()
SIZE, RANK = hvd.size(), hvd.rank()


def training(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    return hvd.elastic.TorchState(model, optimizer, schedule=schedule, step=0)


def one_step(state):
    state.optimizer.zero_grad()
    state.model(torch.arange(6.0).view(2, 3) * (state.step + 1)).pow(2).sum().backward()
    state.optimizer.step()
    state.schedule.step()
    state.step += 1


def weights(state):
    return {name: entry.clone() for name, entry in state.model.state_dict().items()}


def test_a_training_goes_on_from_the_file_as_if_it_had_not_ended(tmp_path):
    path = tmp_path / "training"
    state = training(0)
    one_step(state)
    hvd.Checkpoint(state, path).save()
    one_step(state)

    # Another job, whose ranks have begun differently.
    later = training(1 + RANK)
    assert hvd.Checkpoint(later, path).resume()
    assert later.step == 1
    one_step(later)
    for name, entry in weights(state).items():
        torch.testing.assert_close(weights(later)[name], entry, rtol=0, atol=0, msg=name)
    assert later.optimizer.param_groups[0]["lr"] == 0.1 * 0.25


def test_a_file_of_another_model_is_an_error_on_all_ranks(tmp_path):
    path = tmp_path / "training"
    hvd.Checkpoint(hvd.elastic.TorchState(torch.nn.Linear(3, 2)), path).save()
    with pytest.raises(ValueError, match=r"(?s)Cannot resume from .*RuntimeError: .*size mismatch"):
        hvd.Checkpoint(hvd.elastic.TorchState(torch.nn.Linear(4, 2)), path).resume()
    with pytest.raises(
        ValueError, match=r"the file has \['model', 'optimizer'\]|the file has \['model'\]"
    ):
        hvd.Checkpoint(hvd.elastic.TorchState(net=torch.nn.Linear(3, 2)), path).resume()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_nan_is_named(dtype):
    module = torch.nn.Linear(2, 2).to(dtype)
    hvd.check_finite(module.named_parameters())
    if RANK == SIZE - 1:
        with torch.no_grad():
            module.weight[0, 0] = math.nan
            module.weight[0, 1] = math.inf
    text = rf"rank {SIZE - 1}: 'weight' has 1 NaN and 1 infinite of 4 values"
    with pytest.raises(FloatingPointError, match=text):
        hvd.check_finite(module.named_parameters())


def test_norm_of_gradients():
    model = torch.nn.Linear(2, 1)
    assert hvd.global_gradient_norm(model.parameters()) == 0
    model(torch.tensor([[3.0, 4.0]])).sum().backward()
    # 3, 4 and 1 for the bias.
    assert hvd.global_gradient_norm(model.parameters()) == pytest.approx(math.sqrt(26))
    half = [torch.full((4,), 300.0, dtype=torch.float16)]
    assert hvd.global_gradient_norm(half) == 600
    twice = torch.sparse_coo_tensor([[0, 0]], [3.0, 1.0], (2,))
    assert hvd.global_gradient_norm([twice]) == 4
