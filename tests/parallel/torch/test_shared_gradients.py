"""Gradients that share memory with each other, with what backward still reads, or with the script's own tensors."""

import os
import random
import time

import pytest
import torch

import horovod.torch as hvd
from horovod.torch import _gradient_sending, _memory_owners

hvd.init()
SIZE, RANK = hvd.size(), hvd.rank()
several = pytest.mark.skipif(SIZE == 1, reason="needs several ranks")

# The mean of the ranks' weights (rank + 1).
MEAN = (SIZE + 1) / 2


def parameters(*shapes):
    return [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]


def wrap(params, **options):
    named = [(f"p{i}", param) for i, param in enumerate(params)]
    return hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), named, **options)


def weights(shape=(6,)):
    return torch.arange(6.0).reshape(shape) * (RANK + 1)


def one_sum(a, b):
    return ((a[None] + b[None]) * weights()).sum()


def transposes(a, b):
    return (torch.eye(2) @ (a.t() + b.t()) * weights((2, 3))).sum()


def other_shapes(a, b):
    return ((a.squeeze(0) + b.reshape(6)) * weights()).sum()


GRAPHS = {
    "one_sum": (one_sum, (6,), (6,)),
    "transposes": (transposes, (3, 2), (3, 2)),
    "other_shapes": (other_shapes, (1, 6), (2, 3)),
}


@pytest.fixture(params=["counted", "not_counted"])
def _count(request, monkeypatch):
    """With PyTorch's count of owners, and without, as where PyTorch has none."""
    if request.param == "not_counted":
        monkeypatch.setattr(_memory_owners, "_count", None)


@pytest.mark.usefixtures("_count")
@pytest.mark.parametrize("groups", [None, 2])
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
@pytest.mark.parametrize("graph", GRAPHS)
def test_two_parameters_get_views_of_one_gradient(graph, op, groups):
    function, *shapes = GRAPHS[graph]
    params = parameters(*shapes)
    optimizer = wrap(params, op=op, groups=groups)
    scale = MEAN if op == hvd.Average else MEAN * SIZE
    for step in range(1, 4):
        optimizer.zero_grad()
        function(*params).backward()
        optimizer.step()
        for param in params:
            want = torch.autograd.grad(function(*params), params)[0] / (RANK + 1) * -scale * step
            assert torch.equal(param.detach().reshape(-1).sort()[0], want.reshape(-1).sort()[0])


@several
def test_backward_passes_that_are_accumulated_before_the_step():
    """PyTorch adds the second pass in place, to memory that the first has given to both. One rank sends nothing: there
    both parameters have what PyTorch alone makes of this: the second pass twice."""
    for options, how in (
        ({"backward_passes_per_step": 2}, "passes"),
        ({}, "no_sync"),
        ({"groups": 1}, "group"),
    ):
        a, b, c = parameters(6, 6, 6)
        optimizer = wrap([a, b, c], **options)
        for last in (False, True):
            loss = one_sum(a, b) + (c.sum() if last or how == "passes" else 0)
            if how == "no_sync" and not last:
                with optimizer.no_sync():
                    loss.backward()
            else:
                loss.backward()
        optimizer.step()
        for param in (a, b):
            assert torch.equal(param.detach(), torch.arange(6.0) * -2 * MEAN), how


@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.fp16])
@pytest.mark.parametrize("wait", [True, False])
def test_results_of_autograd_grad_are_assigned(wait, compression):
    a, b = parameters(6, 6)
    optimizer = wrap([a, b], compression=compression)
    optimizer.wait_in_backward = wait
    a.grad, b.grad = torch.autograd.grad(one_sum(a, b), [a, b])
    optimizer.step()
    for param in (a, b):
        assert torch.equal(param.detach(), torch.arange(6.0) * -MEAN)


def test_one_tensor_is_assigned_twice():
    a, b = parameters(6, 6)
    optimizer = wrap([a, b])
    a.grad = b.grad = weights()
    optimizer.step()
    for param in (a, b):
        assert torch.equal(param.detach(), torch.arange(6.0) * -MEAN)


def test_overlapping_slices_are_assigned():
    a, b = parameters(4, 4)
    optimizer = wrap([a, b])
    memory = weights()
    a.grad, b.grad = memory[:4], memory[2:]
    optimizer.step()
    assert torch.equal(a.detach(), torch.arange(0.0, 4.0) * -MEAN)
    assert torch.equal(b.detach(), torch.arange(2.0, 6.0) * -MEAN)
    assert torch.equal(memory, weights())


def _foreign_views(kind):
    """Two tensors on the same memory, which another library owns: their storages do not know each other."""
    memory = weights().numpy()
    make = {"numpy": torch.from_numpy, "dlpack": torch.from_dlpack}[kind]
    return memory, make(memory), make(memory)


class FromOutside(torch.autograd.Function):
    """The sum of two parameters, whose gradients another library has computed."""

    @staticmethod
    def forward(ctx, a, b, given):
        ctx.given = given
        return (a + b).sum()

    @staticmethod
    def backward(ctx, _):
        return *ctx.given.pop(), None


@pytest.mark.parametrize("how", ["assigned", "backward", "early"])
@pytest.mark.parametrize("options", [{}, {"groups": 1}, {"groups": 2}], ids=str)
@pytest.mark.parametrize("kind", ["numpy", "dlpack"])
def test_gradients_on_memory_of_another_library(kind, options, how, monkeypatch):
    if how == "early":
        monkeypatch.setattr(_gradient_sending, "_host_bytes", lambda: 1)
    a, b = parameters(6, 6)
    optimizer = wrap([a, b], op=hvd.Sum, **options)
    memory, *views = _foreign_views(kind)
    if how == "assigned":
        a.grad, b.grad = views
    else:
        given = [tuple(views)]
        del views
        FromOutside.apply(a, b, given).backward()
    optimizer.step()
    for param in (a, b):
        assert torch.equal(param.detach(), torch.arange(6.0) * -MEAN * SIZE)
    assert torch.equal(torch.from_numpy(memory), weights())


def test_the_scripts_one_memory_for_all_gradients_gets_the_results():
    """Parts that do not overlap: PyTorch adds to them in place, and so scripts clip or clear all at once."""
    a, b = parameters(2, 4)
    optimizer = wrap([a, b])
    memory = torch.zeros(6)
    a.grad, b.grad = memory[:2], memory[2:]
    for step in range(1, 4):
        memory.zero_()
        (torch.cat([a, b]) * weights()).sum().backward()
        assert torch.equal(memory, torch.arange(6.0) * MEAN)
        optimizer.step()
        assert torch.equal(torch.cat([a, b]).detach(), torch.arange(6.0) * -MEAN * step)


def test_the_gradient_that_the_script_gives_to_backward_stays_as_it_is():
    (p,) = parameters((2, 3))
    optimizer = wrap([p])
    for _ in range(2):
        optimizer.zero_grad()
        given = weights()
        given *= 1  # changed in place, as what was accumulated
        p.view(6).backward(given)
        assert torch.equal(given, weights())
        assert torch.equal(p.grad.view(6), torch.arange(6.0) * MEAN)


def test_gradients_that_hooks_of_activations_see_stay_as_they_are():
    a, b = parameters(6, (1, 6))
    optimizer = wrap([a, b])
    seen = []
    hidden = a[None] + b
    hidden.register_hook(seen.append)
    (hidden * weights()).sum().backward()
    assert torch.equal(seen[0], weights((1, 6)))
    optimizer.step()
    assert torch.equal(seen[0], weights((1, 6)))
    assert torch.equal(a.detach(), torch.arange(6.0) * -MEAN)


def addresses_when_accumulated(params):
    """Where backward puts the parameters' gradients, by parameter; filled while backward runs."""
    at = {}
    for param in params:
        param.register_post_accumulate_grad_hook(lambda p: at.update({p: p.grad.data_ptr()}))
    return at


def test_a_gradient_that_is_nobody_elses_is_reduced_where_it_is(monkeypatch):
    """No copy: the memory is the one that backward has chosen, early and at the end of the pass."""
    monkeypatch.setattr(_gradient_sending, "_host_bytes", lambda: 100)
    large, small = parameters((512, 256), 6)
    at = addresses_when_accumulated([large, small])
    optimizer = wrap([large, small])
    ((large.sum() + (small * 2).sum()) * (RANK + 1)).backward()
    assert {param: param.grad.data_ptr() for param in (large, small)} == at
    assert _memory_owners._count is not None
    optimizer.step()


LAYERS = {
    "linear": lambda: (torch.nn.Linear(512, 256), torch.ones(4, 512)),
    "linear_of_batches": lambda: (torch.nn.Linear(512, 256), torch.ones(2, 4, 512)),
    "convolution": lambda: (torch.nn.Conv2d(64, 128, 3), torch.ones(1, 64, 5, 5)),
    "norm": lambda: (torch.nn.LayerNorm(1 << 17), torch.rand(2, 1 << 17)),
    "embedding": lambda: (torch.nn.Embedding(512, 256), torch.arange(4)),
    "attention": lambda: (
        torch.nn.TransformerEncoderLayer(256, 4, 512, batch_first=True),
        torch.rand(2, 4, 256),
    ),
    "recurrent": lambda: (torch.nn.LSTM(256, 128), torch.rand(3, 2, 256)),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_gradients_of_layers_are_reduced_where_they_are(layer, monkeypatch):
    """Backward of a linear layer makes a view, whose base nothing else keeps."""
    module, data = LAYERS[layer]()
    params = list(module.parameters())
    monkeypatch.setattr(_gradient_sending, "_host_bytes", lambda: 1)
    # Its gradient is the last one, so all others are sent while backward goes on.
    (scale,) = parameters(())
    at = addresses_when_accumulated([*params, scale])
    optimizer = wrap([*params, scale])
    out = module(data * (1 + scale) if data.is_floating_point() else data)
    (out[0] if layer == "recurrent" else out).pow(2).sum().backward()
    assert [param.grad.data_ptr() for param in params] == [at[param] for param in params]
    optimizer.step()


@several
@pytest.mark.parametrize("holder", ["node", "python", "saved"])
def test_the_base_of_a_view_is_read_again(holder, monkeypatch):
    """The parameter's gradient is a view of one that another node, the script, or another graph still needs."""
    monkeypatch.setattr(_gradient_sending, "_host_bytes", lambda: 1)
    (p,) = parameters((512, 256))
    other = torch.nn.Parameter(torch.zeros(512, 256))
    seen = []

    def turned(x):
        if holder == "python":
            x.register_hook(lambda grad: seen.append(grad))
        return x

    optimizer = wrap([p])
    hidden = turned(p.t() + Delayed.apply(other.t() * 2))
    weight = torch.arange(256.0 * 512).reshape(256, 512) * (RANK + 1)
    if holder == "saved":
        square = other.sum()
        (hidden * weight).sum().backward(retain_graph=True)
        square.backward()
    else:
        (hidden * weight).sum().backward()
    assert torch.equal(p.grad, torch.arange(256.0 * 512).reshape(256, 512).t() * MEAN)
    own = torch.arange(256.0 * 512).reshape(256, 512) * (RANK + 1)
    assert torch.equal(other.grad - (1 if holder == "saved" else 0), 2 * own.t())
    for grad in seen:
        assert torch.equal(grad, own)
    optimizer.step()


class Delayed(torch.autograd.Function):
    """Lets time pass in backward before the gradient is read."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        time.sleep(0.02)
        return grad * 1


@several
def test_backward_reads_on_what_is_reduced_early(monkeypatch):
    """`position`'s gradient is a view of the one that flows on; it is large enough to be sent before backward ends."""
    monkeypatch.setattr(_gradient_sending, "_host_bytes", lambda: 1)
    torch.manual_seed(0)
    data = torch.randn(SIZE, 512, 8)
    hidden = torch.nn.Linear(8, 256)
    position = torch.nn.Parameter(torch.randn(512, 256) * 0.1)
    named = [("position", position), *hidden.named_parameters()]
    params = [param for _, param in named]

    def loss(rank):
        return (Delayed.apply(hidden(data[rank : rank + 1])) + position[None]).tanh().pow(2).sum()

    wanted = [
        sum(g) / SIZE
        for g in zip(*(torch.autograd.grad(loss(r), params) for r in range(SIZE)), strict=True)
    ]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=0.0), named)
    for _ in range(5):
        optimizer.zero_grad()
        loss(RANK).backward()
        optimizer.step()
        for param, want in zip(params, wanted, strict=True):
            torch.testing.assert_close(param.grad, want)


# ---- broadcast_parameters ------------------------------------------------------------------------------------------


def test_entries_of_broadcast_parameters_may_share_memory():
    memory = torch.arange(6.0) + 100 * RANK
    params = {"all": memory, "part": memory[2:5], "again": memory, "turned": memory.view(2, 3).t()}
    hvd.broadcast_parameters(params, root_rank=0)
    assert torch.equal(memory, torch.arange(6.0))


@several
def test_broadcast_parameters_refuses_entries_that_share_memory_on_one_rank_only():
    tied = torch.full((3,), float(RANK))
    apart = [torch.zeros(3), torch.ones(3)]
    first, second = apart if RANK == 0 else (tied, tied)
    params = {"first": first, "second": second}
    if RANK == 0:
        hvd.broadcast_parameters(params, root_rank=0)
    else:
        with pytest.raises(ValueError, match=r"'first' shares memory .* Share \(tie\) the same"):
            hvd.broadcast_parameters(params, root_rank=0)


# ---- random graphs -------------------------------------------------------------------------------------------------

SHAPES = [(12,), (1, 12), (3, 4), (4, 3), (2, 6), (1, 3, 4)]


def random_graph(choice):
    """The shapes of up to six parameters, and a function of them that makes views, sums and transposes."""
    shapes = [choice.choice(SHAPES) for _ in range(choice.randint(2, 6))]
    plan = []
    for i in range(choice.randint(1, 8)):
        plan.append(
            (
                choice.random(),
                choice.randrange(len(shapes) + i),
                choice.randrange(len(shapes) + i),
                choice.choice(SHAPES),
            )
        )

    def function(params, scale):
        values = list(params)
        for kind, i, j, shape in plan:
            x, y = values[i], values[j]
            if kind < 0.3:
                values.append(x.reshape(shape))
            elif kind < 0.4:
                values.append(x.transpose(0, x.dim() - 1))
            elif kind < 0.5:
                values.append(x[None] if x.dim() < 4 else x.squeeze())
            elif kind < 0.9:
                values.append(x + y.reshape(x.shape))
            else:
                values.append(torch.cat([x.reshape(12)[:6], y.reshape(12)[6:]]))
        total = sum(value.reshape(12) for value in values[-3:])
        return (total * torch.arange(1.0, 13.0) * scale).sum()

    return shapes, function


def check_random_graph(seed):
    choice = random.Random(seed)
    shapes, function = random_graph(choice)
    options = {
        "groups": choice.choice([None, None, 1, 2]),
        "op": choice.choice([hvd.Average, hvd.Sum]),
        "backward_passes_per_step": choice.choice([1, 1, 1, 2]),
    }
    passes = options["backward_passes_per_step"]
    factor = (MEAN if options["op"] == hvd.Average else MEAN * SIZE) * passes
    params = parameters(*shapes)
    grads = torch.autograd.grad(function(params, 1.0), params, allow_unused=True)
    wanted = [
        torch.zeros(s) if g is None else g * -factor for g, s in zip(grads, shapes, strict=True)
    ]
    optimizer = wrap(params, **options)
    if choice.random() < 0.2 and passes == 1:
        for param, grad in zip(
            params,
            torch.autograd.grad(function(params, RANK + 1.0), params, allow_unused=True),
            strict=True,
        ):
            param.grad = grad
    else:
        for _ in range(passes):
            function(params, RANK + 1.0).backward()
    optimizer.step()
    for i, (param, want) in enumerate(zip(params, wanted, strict=True)):
        assert torch.equal(param.detach(), want), f"seed {seed}, parameter {i}: {options}"


@pytest.mark.parametrize("early", [False, True], ids=["at_the_end", "early"])
def test_random_graphs_are_as_in_one_process(early, monkeypatch):
    """`HVD_GRAPHS=2000` for more; `early` sends each gradient while backward goes on."""
    if early:
        monkeypatch.setattr(_gradient_sending, "_host_bytes", lambda: 1)
    for seed in range(int(os.environ.get("HVD_GRAPHS", "30"))):
        check_random_graph(seed)
