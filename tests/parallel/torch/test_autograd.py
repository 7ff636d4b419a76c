"""Gradients through the differentiable operations, with the factors that scripts rely on; also of second order."""

import warnings

import pytest
import torch
from ops_support import still_works

import horovod.torch as hvd


@pytest.fixture(autouse=True)
def _no_warnings_of_our_own():
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        # Gathers and broadcasts average their gradients under the old name, and have always said so.
        warnings.filterwarnings("ignore", "Parameter `average`", DeprecationWarning)
        yield
    still_works()


def leaf(*shape, salt=0):
    """This rank's input."""
    generator = torch.Generator().manual_seed(100 * hvd.rank() + salt)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def weights(rank, *shape):
    """A rank's factors for its output: its incoming gradient."""
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def all_weights(*shape):
    return torch.stack([weights(rank, *shape) for rank in range(hvd.size())])


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def grad_of(output, x, shape):
    [grad] = torch.autograd.grad((output * weights(hvd.rank(), *shape)).sum(), x)
    return grad


@pytest.mark.parametrize(
    "call",
    [
        lambda x: hvd.allgather(x),
        lambda x: hvd.grouped_allgather([x])[0],
        lambda x: hvd.broadcast(x, 0),
    ],
    ids=["allgather", "grouped_allgather", "broadcast"],
)
def test_averaged_gradients_come_with_the_warning_of_old(call):
    output = call(leaf(2))
    with pytest.warns(DeprecationWarning, match="Parameter `average`"):
        output.sum().backward()


@pytest.mark.parametrize("average", [True, False])
def test_allreduce_reduces_the_gradient_in_the_same_way(average):
    x = leaf(4, 3)
    op = hvd.Average if average else hvd.Sum
    grad = grad_of(hvd.allreduce(x, op=op), x, (4, 3))
    every = all_weights(4, 3)
    close(grad, every.mean(0) if average else every.sum(0))


def test_allreduce_scales_the_gradient():
    x = leaf(3)
    y = hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.25)
    close(grad_of(y, x, (3,)), all_weights(3).sum(0) * 0.5)


@pytest.mark.parametrize(("op", "reduce"), [(hvd.Min, "amin"), (hvd.Max, "amax")])
def test_other_operators_are_applied_to_the_gradient_again(op, reduce):
    x = leaf(3)
    close(grad_of(hvd.allreduce(x, op=op), x, (3,)), getattr(all_weights(3), reduce)(0))


def test_grouped_allreduce():
    x, y = leaf(4, 3), leaf(2, salt=1)
    a, b = hvd.grouped_allreduce([x, y], op=hvd.Sum)
    loss = (a * weights(hvd.rank(), 4, 3)).sum() + (b * weights(hvd.rank(), 2)).sum()
    grad_x, grad_y = torch.autograd.grad(loss, (x, y))
    close(grad_x, all_weights(4, 3).sum(0))
    close(grad_y, all_weights(2).sum(0))


def test_a_group_output_that_is_not_used_gets_zeros():
    x, y = leaf(3), leaf(2)
    a, _ = hvd.grouped_allreduce([x, y], op=hvd.Sum)
    grad_x, grad_y = torch.autograd.grad(a.sum(), (x, y))
    close(grad_x, torch.full((3,), float(hvd.size()), dtype=torch.float64))
    close(grad_y, torch.zeros(2, dtype=torch.float64))


def rows_of(rank):
    return rank + 1


def first_row(rank):
    return sum(rows_of(r) for r in range(rank))


def test_allgather_gives_each_rank_its_rows_of_the_average():
    x = leaf(rows_of(hvd.rank()), 2)
    total = first_row(hvd.size())
    grad = grad_of(hvd.allgather(x), x, (total, 2))
    start = first_row(hvd.rank())
    close(grad, all_weights(total, 2).mean(0)[start : start + x.shape[0]])


def test_grouped_allgather():
    x, y = leaf(rows_of(hvd.rank()), 2), leaf(2, salt=1)
    total = first_row(hvd.size())
    a, b = hvd.grouped_allgather([x, y])
    loss = (a * weights(hvd.rank(), total, 2)).sum() + (
        b * weights(hvd.rank(), 2 * hvd.size())
    ).sum()
    grad_x, grad_y = torch.autograd.grad(loss, (x, y))
    start = first_row(hvd.rank())
    close(grad_x, all_weights(total, 2).mean(0)[start : start + x.shape[0]])
    close(grad_y, all_weights(2 * hvd.size()).mean(0)[2 * hvd.rank() : 2 * hvd.rank() + 2])


def test_broadcast_gives_the_root_the_average_and_the_others_zeros():
    for root in range(hvd.size()):
        x = leaf(3, 2)
        grad = grad_of(hvd.broadcast(x, root), x, (3, 2))
        want = all_weights(3, 2).mean(0)
        close(grad, want if hvd.rank() == root else torch.zeros_like(want))


def test_infinite_gradients_do_not_reach_other_ranks_as_nan():
    x = leaf(2)
    [grad] = torch.autograd.grad((hvd.broadcast(x, 0) * float("inf")).sum(), x)
    assert not grad.isnan().any()


def splits_of(rank):
    return [(rank + d) % 3 for d in range(hvd.size())]


@pytest.mark.parametrize("surplus", [0, 3])
def test_alltoall_sends_the_gradient_back(surplus):
    splits = splits_of(hvd.rank())
    x = leaf(sum(splits) + surplus, 2)
    y, received = hvd.alltoall(x, splits=torch.tensor(splits))
    assert not received.requires_grad
    [grad] = torch.autograd.grad((y * (hvd.rank() + 1)).sum(), x)
    # A row that went to rank r comes back with what r multiplied it with.
    sent = [float(r + 1) for r, n in enumerate(splits) for _ in range(n)]
    close(grad[:, 0], torch.tensor(sent + [0.0] * surplus, dtype=torch.float64))


def test_alltoall_with_an_even_split():
    x = leaf(2 * hvd.size())
    y = hvd.alltoall(x)
    [grad] = torch.autograd.grad((y * (hvd.rank() + 1)).sum(), x)
    want = torch.arange(1.0, hvd.size() + 1, dtype=torch.float64).repeat_interleave(2)
    close(grad, want)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
@pytest.mark.parametrize("grouped", [False, True])
def test_reducescatter_gathers_the_gradient(op, grouped):
    x = leaf(2 * hvd.size(), 3)
    if grouped:
        y = hvd.grouped_reducescatter([x], op=op, prescale_factor=2.0, postscale_factor=3.0)[0]
    else:
        y = hvd.reducescatter(x, op=op, prescale_factor=2.0, postscale_factor=3.0)
    grad = grad_of(y, x, (2, 3))
    factor = 6.0 * (hvd.size() if op == hvd.Sum else 1)
    close(grad, all_weights(2, 3).flatten(0, 1) * factor)


def test_reducescatter_does_not_change_the_incoming_gradient():
    x = leaf(hvd.size(), 2)
    incoming = torch.ones(1, 2, dtype=torch.float64)
    hvd.reducescatter(x, op=hvd.Sum).backward(incoming)
    assert incoming.eq(1).all()


def differentiable():
    yield "allreduce", lambda x: hvd.allreduce(x, op=hvd.Sum)
    yield "average", lambda x: hvd.allreduce(x)
    yield "grouped_allreduce", lambda x: hvd.grouped_allreduce([x, x])[1]
    yield "allgather", hvd.allgather
    yield "grouped_allgather", lambda x: hvd.grouped_allgather([x, x])[0]
    yield "broadcast", lambda x: hvd.broadcast(x, 0)
    yield "alltoall", hvd.alltoall
    yield "reducescatter", hvd.reducescatter
    yield "grouped_reducescatter", lambda x: hvd.grouped_reducescatter([x, x], op=hvd.Sum)[0]
    yield "fp16", lambda x: hvd.allreduce(x, compression=hvd.Compression.fp16)


CALLS = [pytest.param(call, id=name) for name, call in differentiable()]


@pytest.mark.parametrize("call", CALLS)
def test_expanded_gradients_work(call):
    # sum() hands an expanded, not contiguous gradient back.
    x = leaf(hvd.size(), 2)
    call(x).sum().backward()
    assert x.grad.shape == x.shape
    assert not x.grad.isnan().any()


@pytest.mark.parametrize("call", CALLS)
def test_second_derivatives_exist_on_every_rank(call):
    x = leaf(hvd.size(), 2)
    [grad] = torch.autograd.grad((call(x) ** 2).sum(), x, create_graph=True)
    [second] = torch.autograd.grad(grad.sum(), x)
    assert second.shape == x.shape
    assert not second.isnan().any()


def test_the_second_derivative_of_an_average():
    x = leaf(3)
    [grad] = torch.autograd.grad((hvd.allreduce(x) ** 3).sum(), x, create_graph=True)
    mean = hvd.allreduce(x.detach())
    close(grad, 3 * mean**2)
    [second] = torch.autograd.grad(grad.sum(), x)
    close(second, 6 * mean)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: hvd.synchronize(hvd.allreduce_async(x)),
        lambda x: hvd.synchronize(hvd.allgather_async(x)),
        lambda x: hvd.synchronize(hvd.broadcast_async(x, 0)),
        lambda x: hvd.synchronize(hvd.alltoall_async(x))[0],
        lambda x: hvd.synchronize(hvd.reducescatter_async(x)),
        lambda x: hvd.synchronize(hvd.grouped_allreduce_async([x]))[0],
    ],
)
def test_asynchronous_forms_do_not_record_gradients(call):
    assert not call(leaf(hvd.size(), 2)).requires_grad


def test_in_place_forms_do_not_disturb_a_recorded_graph():
    x = leaf(3)
    y = x * 2
    loss = (y * y).sum()
    hvd.allreduce_(x)  # a leaf that requires gradients, already used
    loss.backward()
    assert x.grad is not None


def test_gradients_inside_a_process_set():
    if hvd.size() < 3:
        pytest.skip("needs three ranks")
    members = hvd.ProcessSet([0, 2])
    hvd.barrier()
    hvd.shutdown()
    hvd.init(process_sets=[members])
    if members.included():
        x = leaf(rows_of(hvd.rank()))
        total = rows_of(0) + rows_of(2)
        [grad] = torch.autograd.grad(hvd.allgather(x, process_set=members).sum(), x)
        close(grad, torch.ones_like(grad))
        y = leaf(total)
        [grad] = torch.autograd.grad((hvd.broadcast(y, 2, process_set=members) * 2).sum(), y)
        close(grad, torch.full_like(y, 2.0 if hvd.rank() == 2 else 0.0).detach())
        z = leaf(4)
        share = hvd.reducescatter(z, op=hvd.Sum, process_set=members)
        [grad] = torch.autograd.grad(share.sum(), z)
        close(grad, torch.full((4,), 2.0, dtype=torch.float64))
    hvd.barrier()
    hvd.shutdown()
    hvd.init()


def test_a_model_trains_through_an_allgather():
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 2)
    inputs = torch.randn(4, 3)
    hvd.allgather(layer(inputs)).pow(2).mean().backward()
    for parameter in layer.parameters():
        assert parameter.grad is not None
        # All ranks have the same model and data here, so also the same gradient.
        torch.testing.assert_close(hvd.allreduce(parameter.grad), parameter.grad)


# -- the transforms of torch.func


def rows(x):
    """As many rows for each rank as there are in all, so that every operation takes it."""
    return x.repeat(hvd.size(), 1)


OPERATIONS = {
    "allreduce": lambda x: hvd.allreduce(x),
    "sum": lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0),
    "grouped_allreduce": lambda x: hvd.grouped_allreduce([x, 2 * x])[1],
    "allgather": lambda x: hvd.allgather(x),
    "grouped_allgather": lambda x: hvd.grouped_allgather([x, 2 * x])[1],
    "broadcast": lambda x: hvd.broadcast(x, 0),
    "reducescatter": lambda x: hvd.reducescatter(rows(x)),
    "grouped_reducescatter": lambda x: hvd.grouped_reducescatter([rows(x)], op=hvd.Sum)[0],
    "alltoall": lambda x: hvd.alltoall(rows(x)),
    "alltoall with splits": lambda x: hvd.alltoall(rows(x), [len(x)] * hvd.size())[0],
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_torch_func_gives_the_gradients_of_autograd(operation):
    def loss(x):
        out = operation(x)
        return (out * out * torch.arange(1.0, out.numel() + 1).view_as(out)).sum()

    x = leaf(2, 3)
    [want] = torch.autograd.grad(loss(x), x)
    close(torch.func.grad(loss)(x.detach()), want)
    value = torch.func.grad_and_value(loss)(x.detach())[1]
    close(value, loss(x).detach())


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_vmap_gives_what_a_loop_gives(operation, dim):
    batch = torch.stack([leaf(2, 3, salt=i).detach() for i in range(4)], dim)
    got = torch.vmap(operation, in_dims=dim)(batch)
    want = torch.stack([operation(x) for x in batch.unbind(dim)])
    close(got, want)


def test_gradients_of_single_samples():
    def loss(weight, x):
        return (hvd.allreduce(weight) * x).pow(2).sum()

    weight, xs = leaf(3).detach(), torch.stack([leaf(3, salt=i).detach() for i in range(4)])
    got = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(weight, xs)
    want = torch.stack([torch.func.grad(loss)(weight, x) for x in xs])
    close(got, want)


def test_what_vmap_cannot_do_is_refused_with_words():
    batch = leaf(4, 3).detach()
    with pytest.raises(ValueError, match=r"op=Adasum under torch.vmap: .* outside of vmap"):
        torch.vmap(lambda x: hvd.allreduce(x, op=hvd.Adasum))(batch)
    with pytest.raises(ValueError, match="the tensors of a batch have no dimension"):
        torch.vmap(lambda x: hvd.allgather(x))(leaf(4).detach())


def test_operations_in_place_say_what_to_use_inside_of_transforms():
    def inside(transform, operation):
        with pytest.raises(RuntimeError) as error:
            transform(operation)(torch.ones(3, 2))
        assert any("hvd.allreduce instead of" in note for note in error.value.__notes__)

    inside(torch.func.grad, lambda x: hvd.allreduce_(x * 1).sum())
    inside(torch.func.grad, lambda x: hvd.synchronize(hvd.allgather_async(x * 1)).sum())
    inside(torch.vmap, lambda x: hvd.broadcast_(x * 1, 0))
    # A tensor that no transform sees is sent as ever.
    plain = torch.ones(3)
    torch.func.grad(lambda x: (x * hvd.allreduce_(plain, op=hvd.Sum)).sum())(torch.ones(3))
    assert plain.eq(hvd.size()).all()
