"""SyncBatchNorm is the batch normalisation of the concatenated batch."""

import copy

import pytest
import torch
from ops_support import still_works

import horovod.torch as hvd

# Rows of each rank's batch, uneven.
ROWS = [3, 5, 2, 4]
SHAPES = {"1d": (4,), "1d_sequence": (4, 6), "2d": (4, 3, 5), "3d": (4, 2, 3, 2)}
PLAIN = {
    2: torch.nn.BatchNorm1d,
    3: torch.nn.BatchNorm1d,
    4: torch.nn.BatchNorm2d,
    5: torch.nn.BatchNorm3d,
}


def batch(shape, dtype=torch.float64, seed=0, rows=None):
    """The whole batch, and which rows are this rank's."""
    rows = (ROWS if rows is None else rows)[: hvd.size()]
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(sum(rows), *shape, generator=generator, dtype=torch.float64) * 3 + 7
    start = sum(rows[: hvd.rank()])
    return whole.to(dtype), slice(start, start + rows[hvd.rank()])


def pair(shape, dtype=torch.float64, **options):
    """A synchronised layer and the plain one of a single process, with the same random weights."""
    sync = hvd.SyncBatchNorm(shape[0], dtype=dtype, **options)
    plain = PLAIN[len(shape) + 1](shape[0], dtype=dtype, **options)
    if sync.affine:
        torch.manual_seed(1)
        with torch.no_grad():
            for name in ("weight", "bias"):
                value = torch.randn(shape[0], dtype=dtype)
                getattr(sync, name).copy_(value)
                getattr(plain, name).copy_(value)
    return sync, plain


def compare_training_step(sync, plain, whole, mine, tolerance):
    """One forward and backward of both; outputs, gradients and statistics have to agree."""
    x = whole[mine].clone().requires_grad_()
    x_whole = whole.clone().requires_grad_()
    torch.manual_seed(2)
    incoming = torch.randn(whole.shape, dtype=torch.float64).to(whole.dtype)

    y = sync(x)
    y_whole = plain(x_whole)
    y.backward(incoming[mine])
    y_whole.backward(incoming)

    def close(got, want, what):
        torch.testing.assert_close(
            got, want, rtol=tolerance, atol=tolerance, msg=lambda m: f"{what}: {m}"
        )

    assert y.dtype == whole.dtype
    close(y, y_whole[mine], "output")
    close(x.grad, x_whole.grad[mine], "gradient of the input")
    if sync.affine:
        # Local shares; their sum is the gradient of the whole batch.
        for name in ("weight", "bias"):
            total = hvd.allreduce(getattr(sync, name).grad, op=hvd.Sum)
            close(total, getattr(plain, name).grad, f"gradient of {name}")
    if sync.running_mean is not None:
        close(sync.running_mean, plain.running_mean, "running mean")
        close(sync.running_var, plain.running_var, "running variance")
        assert torch.equal(sync.num_batches_tracked, plain.num_batches_tracked)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": None},
        {"momentum": 0.5, "eps": 0.01},
        {"affine": False},
        {"track_running_stats": False},
    ],
    ids=["defaults", "cumulative", "eps", "not affine", "no statistics"],
)
def test_training_equals_one_process_on_the_whole_batch(shape, options):
    sync, plain = pair(shape, **options)
    for step in range(3):
        whole, mine = batch(shape, seed=step)
        sync.zero_grad()
        plain.zero_grad()
        compare_training_step(sync, plain, whole, mine, tolerance=1e-9)
    sync.eval()
    plain.eval()
    if options.get("track_running_stats", True):
        torch.testing.assert_close(sync(whole[mine]), plain(whole[mine]), rtol=1e-9, atol=1e-9)
    else:
        torch.testing.assert_close(sync(whole[mine]), plain(whole)[mine], rtol=1e-9, atol=1e-9)


def test_float32_agrees_to_a_millionth():
    sync, plain = pair((4, 3, 5), dtype=torch.float32)
    whole, mine = batch((4, 3, 5), dtype=torch.float32)
    compare_training_step(sync, plain, whole, mine, tolerance=1e-5)

    # In float64 arithmetic the difference is below 1e-6 by far; what remains is float32 rounding.
    double, _ = pair((4, 3, 5))
    torch.testing.assert_close(
        sync(whole[mine]).double(), double(whole[mine].double()), rtol=1e-5, atol=1e-5
    )


def test_a_large_mean_costs_no_digits():
    sync, plain = pair((4,))
    whole, mine = batch((4,))
    compare_training_step(sync, plain, whole + 1e6, mine, tolerance=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_inputs_with_float32_statistics(dtype):
    sync, _ = pair((4, 6), dtype=torch.float32)
    reference, _ = pair((4, 6), dtype=torch.float32)
    whole, mine = batch((4, 6), dtype=dtype)
    x = whole[mine].clone().requires_grad_()
    y = sync(x)
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), reference(whole[mine].float()), rtol=2e-2, atol=2e-2)
    y.float().sum().backward()
    assert x.grad.dtype == dtype


def test_layouts_and_expanded_gradients():
    sync, plain = pair((4, 3, 5))
    whole, mine = batch((4, 3, 5))
    x = whole[mine].to(memory_format=torch.channels_last).requires_grad_()
    y = sync(x)
    torch.testing.assert_close(y, plain(whole)[mine], rtol=1e-9, atol=1e-9)
    y.sum().backward()
    assert x.grad.abs().max() < 1e-9


def test_a_rank_may_have_an_empty_batch():
    rows = [0, 5, 2, 4] if hvd.size() > 1 else [3]
    sync, plain = pair((4, 3))
    whole, mine = batch((4, 3), rows=rows)
    compare_training_step(sync, plain, whole, mine, tolerance=1e-9)


def test_inputs_that_need_no_gradient():
    sync, plain = pair((4,))
    whole, mine = batch((4,))
    sync(whole[mine]).sum().backward()
    plain(whole).sum().backward()
    torch.testing.assert_close(hvd.allreduce(sync.bias.grad, op=hvd.Sum), plain.bias.grad)
    with torch.no_grad():
        sync(whole[mine])


def test_evaluation_does_not_communicate():
    sync, plain = pair((4,))
    if hvd.rank() == 0:
        sync.eval()
        plain.eval()
        x = torch.randn(3, 4, dtype=torch.float64)
        torch.testing.assert_close(sync(x), plain(x))
    still_works()


def test_too_few_dimensions():
    with pytest.raises(ValueError, match="at least 2D input"):
        hvd.SyncBatchNorm(3)(torch.ones(3))


def test_one_value_in_total_is_too_little():
    rows = [1, 0, 0, 0]
    sync, _ = pair((4,))
    whole, mine = batch((4,), rows=rows)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        sync(whole[mine])


def test_numbers_of_channels_that_differ_are_reported():
    if hvd.size() == 1:
        pytest.skip("needs several ranks")
    channels = 4 if hvd.rank() == 0 else 5
    with pytest.raises(hvd.HorovodInternalError, match="Mismatched"):
        hvd.SyncBatchNorm(channels)(torch.randn(3, channels))
    still_works()


def test_layers_are_converted_with_their_state():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 4),
        torch.nn.BatchNorm1d(4, eps=0.1, momentum=None),
        torch.nn.Sequential(torch.nn.BatchNorm1d(4, affine=False), torch.nn.ReLU()),
    )
    model(torch.randn(6, 3))
    reference = copy.deepcopy(model)
    weight = model[1].weight
    converted = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
    assert converted is model
    assert isinstance(model[1], hvd.SyncBatchNorm)
    assert isinstance(model[2][0], hvd.SyncBatchNorm)
    assert model[1].weight is weight
    assert model[1].eps == 0.1
    assert model.state_dict().keys() == reference.state_dict().keys()
    single = hvd.SyncBatchNorm.convert_sync_batchnorm(torch.nn.BatchNorm2d(5))
    assert isinstance(single, hvd.SyncBatchNorm)

    generator = torch.Generator().manual_seed(5)
    whole = torch.randn(4 * hvd.size(), 3, generator=generator)
    mine = whole[4 * hvd.rank() : 4 * hvd.rank() + 4]
    want = reference(whole)[4 * hvd.rank() : 4 * hvd.rank() + 4]
    torch.testing.assert_close(model(mine), want, rtol=1e-5, atol=1e-5)


def test_a_process_set_of_its_own():
    if hvd.size() < 3:
        pytest.skip("needs three ranks")
    members = hvd.ProcessSet([0, 2])
    hvd.barrier()
    hvd.shutdown()
    hvd.init(process_sets=[members])
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(hvd.size() * 3, 4, generator=generator)
    mine = whole[3 * hvd.rank() : 3 * hvd.rank() + 3]
    got = hvd.SyncBatchNorm(4, process_set=members)(mine)
    if members.included():
        together = torch.cat([whole[0:3], whole[6:9]])
        want = torch.nn.BatchNorm1d(4)(together)[0 if hvd.rank() == 0 else 3 :][:3]
    else:
        want = torch.nn.BatchNorm1d(4)(mine)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    hvd.barrier()
    hvd.shutdown()
    hvd.init()


def test_a_copy_made_before_the_job_began_is_synchronised_too():
    hvd.barrier()
    hvd.shutdown()
    layer = copy.deepcopy(hvd.SyncBatchNorm(4))
    hvd.init()
    whole, mine = batch((4,), dtype=torch.float32)
    want = torch.nn.BatchNorm1d(4)(whole)[mine]
    torch.testing.assert_close(layer(whole[mine]), want, rtol=1e-5, atol=1e-5)


def test_second_derivatives_are_refused_clearly():
    x = torch.randn(3, 4, requires_grad=True)
    y = hvd.SyncBatchNorm(4)(x)
    [grad] = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    if hvd.size() > 1:
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()
    else:
        grad.sum().backward()


def test_networks_of_several_layers_train_alike():
    def network(norm):
        torch.manual_seed(0)
        return torch.nn.Sequential(
            torch.nn.Linear(4, 6), norm(6), torch.nn.Tanh(), torch.nn.Linear(6, 5), norm(5)
        ).double()

    model, reference = network(hvd.SyncBatchNorm), network(torch.nn.BatchNorm1d)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        op=hvd.Sum,
    )
    reference_optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(5):
        whole, mine = batch((4,), seed=step)
        for net, opt, x in (
            (model, optimizer, whole[mine]),
            (reference, reference_optimizer, whole),
        ):
            opt.zero_grad()
            net(x).pow(2).sum().backward()
            opt.step()
    for (name, got), want in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(
            got, want, rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )
