"""Objects, parameters and optimizer state: every rank ends with what the root has."""

import copy
import enum
import sys
import threading
from collections import OrderedDict

import pytest
import torch
from ops_support import still_works

import horovod.torch as hvd
from horovod.torch import mpi_ops

# -- objects


class Custom:
    """Defined in the test's module; cloudpickle sends it by value or reference as it likes."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return type(other) is type(self) and other.value == self.value

    __hash__ = None

    def __repr__(self):
        return f"Custom({self.value})"  # names a test, alike on every rank


OBJECTS = [
    None,
    0,
    "text",
    [1, {"a": (2, 3)}],
    {"lr": 0.1, "nested": {"x": [None, True]}},
    b"",
    Custom(5),
    OrderedDict(a=1),
]


@pytest.mark.parametrize("obj", OBJECTS, ids=repr)
def test_objects_are_broadcast(obj):
    for root in range(hvd.size()):
        mine = obj if hvd.rank() == root else f"something else on {hvd.rank()}"
        got = hvd.broadcast_object(mine, root_rank=root)
        assert got == obj
        if hvd.rank() == root:
            assert got is mine


def test_the_types_of_local_objects_do_not_matter():
    # In earlier versions the name on the wire came from the local object's type: this call never returned.
    state = hvd.broadcast_object({"epoch": 3} if hvd.rank() == 0 else None)
    assert state == {"epoch": 3}


def test_objects_of_the_scripts_classes_are_of_the_ranks_own(monkeypatch):
    """cloudpickle sends such classes by value: a member of an enumeration would be equal to none of the rank's own."""
    script = sys.modules["__main__"]

    class Phase(enum.Enum):
        WARMUP = 1
        TRAIN = 2

    class Progress(dict):
        class Part:
            pass

    for kind in (Phase, Progress, Progress.Part):
        kind.__module__ = "__main__"
        kind.__qualname__ = kind.__qualname__.rpartition("<locals>.")[2]
    monkeypatch.setattr(script, "Phase", Phase, raising=False)
    monkeypatch.setattr(script, "Progress", Progress, raising=False)
    part = Progress.Part()
    part.again = part
    sent = {
        "phase": Phase.TRAIN,
        "kinds": [Progress, Phase],
        "part": part,
        "f": lambda: Phase.WARMUP,
    }
    mine = sent if hvd.rank() == 0 else None
    for got in (hvd.broadcast_object(mine, 0), *hvd.allgather_object(sent)):
        assert got["phase"] is Phase.TRAIN
        assert got["kinds"] == [Progress, Phase]
        assert type(got["part"]) is Progress.Part
        assert got["part"].again is got["part"]
        assert got["f"]() is Phase.WARMUP


def test_objects_of_a_script_that_other_ranks_do_not_run(monkeypatch):
    if hvd.rank() == 0:
        script = sys.modules["__main__"]
        kind = type("OnlyOfRankZero", (), {"__module__": "__main__", "number": 7})
        monkeypatch.setattr(script, "OnlyOfRankZero", kind, raising=False)
        mine = kind()
    else:
        mine = None
    assert hvd.broadcast_object(mine, 0).number == 7


def test_positional_arguments_of_broadcast_object():
    assert hvd.broadcast_object(hvd.rank(), hvd.size() - 1, "named") == hvd.size() - 1


def test_functions_may_be_broadcast():
    offset = 7 if hvd.rank() == 0 else 0
    add = hvd.broadcast_object((lambda x: x + offset) if hvd.rank() == 0 else None)
    assert add(1) == 8


def test_large_objects():
    size = 40_000_000
    got = hvd.broadcast_object(b"x" * size if hvd.rank() == 0 else None)
    assert len(got) == size
    parts = hvd.allgather_object(bytes([hvd.rank()]) * 3_000_000)
    assert [part[:1] + part[-1:] for part in parts] == [bytes([r, r]) for r in range(hvd.size())]


def test_objects_are_gathered_in_the_order_of_ranks():
    mine = {"rank": hvd.rank(), "data": "x" * (1000 * hvd.rank())}
    everyone = hvd.allgather_object(mine)
    assert type(everyone) is list
    assert [entry["rank"] for entry in everyone] == list(range(hvd.size()))
    assert [len(entry["data"]) for entry in everyone] == [1000 * r for r in range(hvd.size())]
    assert everyone[hvd.rank()] == mine
    assert everyone[hvd.rank()] is not mine
    assert hvd.allgather_object(None, name="device type") == [None] * hvd.size()


def test_an_object_that_cannot_be_pickled_fails_everywhere():
    lock = threading.Lock()
    root = hvd.size() - 1
    if hvd.rank() == root:
        with pytest.raises(TypeError, match="pickle"):
            hvd.broadcast_object(lock, root)
        with pytest.raises(TypeError, match="pickle"):
            hvd.allgather_object(lock)
    else:
        with pytest.raises(ValueError, match=f"Rank {root} could not pickle its object: TypeError"):
            hvd.broadcast_object(None, root)
        with pytest.raises(ValueError, match=f"Member {root} .* could not pickle its object"):
            hvd.allgather_object(1)
    still_works()


def test_threads_may_broadcast_objects_under_names_of_their_own():
    results = {}

    def work(name):
        results[name] = [
            hvd.broadcast_object((name, i) if hvd.rank() == 0 else None, 0, name) for i in range(5)
        ]

    threads = [threading.Thread(target=work, args=(name,)) for name in ("a", "b", "c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {name: [(name, i) for i in range(5)] for name in ("a", "b", "c")}


# -- parameters


def make_model(seed, channels_last=False):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3),
        torch.nn.BatchNorm2d(4),
        torch.nn.Flatten(),
        torch.nn.Linear(16, 2),
    )
    model.register_buffer("flags", torch.rand(5) > 0.5)
    model.register_buffer("bfloat", torch.randn(3).bfloat16())
    model.register_buffer("scalar", torch.tensor(float(seed)))
    return model.to(memory_format=torch.channels_last) if channels_last else model


def assert_equal_models(a, b):
    for (name, x), y in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        assert torch.equal(x, y), name


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    "params",
    [
        lambda model: model.state_dict(),
        lambda model: dict(model.state_dict()),
        lambda model: list(model.state_dict().items()),
        lambda model: tuple(model.state_dict().items()),
        lambda model: iter(model.state_dict().items()),
        lambda model: list(model.state_dict().values()),
    ],
    ids=["state_dict", "dict", "list", "tuple", "iterator", "tensors"],
)
def test_parameters_become_the_roots(params, channels_last):
    root = hvd.size() - 1
    model = make_model(hvd.rank(), channels_last)
    assert hvd.broadcast_parameters(params(model), root) is None
    assert_equal_models(model, make_model(root))
    assert all(p.is_leaf and p.requires_grad for p in model.parameters())


def test_named_parameters_may_be_passed_as_they_are():
    model = make_model(hvd.rank())
    hvd.broadcast_parameters(model.named_parameters(), root_rank=0)
    for mine, want in zip(model.parameters(), make_model(0).parameters(), strict=True):
        assert torch.equal(mine, want)
    assert not torch.equal(model.scalar, torch.tensor(0.0)) or hvd.rank() == 0


def test_tied_parameters():
    model = torch.nn.Module()
    model.a = torch.nn.Linear(3, 3, bias=False)
    model.b = torch.nn.Linear(3, 3, bias=False)
    model.b.weight = model.a.weight
    with torch.no_grad():
        model.a.weight.fill_(float(hvd.rank() + 5))
    hvd.broadcast_parameters(model.state_dict(), 0)
    assert model.a.weight.eq(5).all()
    assert model.b.weight is model.a.weight


class WithExtraState(torch.nn.Module):
    def __init__(self, extra):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((2,), float(len(extra))))
        self.extra = extra

    def get_extra_state(self):
        return {"extra": self.extra}

    def set_extra_state(self, state):
        self.extra = state["extra"]


def test_state_that_is_no_tensor_travels_too():
    model = WithExtraState("root" if hvd.rank() == 0 else "x" * hvd.rank())
    state = model.state_dict()
    state["nothing"] = None
    hvd.broadcast_parameters(state, root_rank=0)
    assert state.pop("nothing") is None
    model.load_state_dict(state)
    assert model.extra == "root"
    assert model.weight.eq(4).all()


@pytest.mark.parametrize(
    "wrong", [5, "text", torch.ones(2), torch.nn.Linear(1, 1), [("a", "b", "c")]]
)
def test_what_holds_no_parameters_is_refused(wrong):
    with pytest.raises(ValueError, match="invalid params of type"):
        hvd.broadcast_parameters(wrong, root_rank=0)


def test_a_failed_broadcast_leaves_nothing_behind_that_writes():
    """Values restored after the failure must not be overwritten by the rest of it."""
    if hvd.size() == 1:
        pytest.skip("needs several ranks")
    params = [torch.ones(2 + (hvd.rank() == 1 and i == 0)) for i in range(50)]
    before = len(mpi_ops._handle_map)
    with pytest.raises(hvd.HorovodInternalError, match="Mismatched BROADCAST tensor shapes"):
        hvd.broadcast_parameters([(f"left.{i}", p) for i, p in enumerate(params)], 0)
    assert len(mpi_ops._handle_map) == before
    still_works()


def test_parameters_of_different_shapes_are_reported():
    if hvd.size() == 1:
        pytest.skip("needs several ranks")
    layer = torch.nn.Linear(3 if hvd.rank() else 2, 2, bias=False)
    with pytest.raises(hvd.HorovodInternalError, match="Mismatched BROADCAST tensor shapes"):
        hvd.broadcast_parameters(layer.state_dict(), 0)
    still_works()


# -- optimizer state


def factories():
    optim = torch.optim
    yield "sgd", lambda p: optim.SGD(p, lr=0.1, weight_decay=0.1)
    yield "momentum", lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True)
    yield "adam", lambda p: optim.Adam(p, lr=0.1, weight_decay=0.1)
    yield "amsgrad", lambda p: optim.Adam(p, amsgrad=True)
    yield "foreach", lambda p: optim.Adam(p, foreach=True)
    yield "fused", lambda p: optim.Adam(p, fused=True)
    yield "tensor_lr", lambda p: optim.Adam(p, lr=torch.tensor(0.1), foreach=False)
    yield "adamw", lambda p: optim.AdamW(p, weight_decay=0.1)
    yield "adadelta", lambda p: optim.Adadelta(p)
    yield "adagrad", lambda p: optim.Adagrad(p, initial_accumulator_value=0.1)
    yield "adamax", lambda p: optim.Adamax(p)
    yield "asgd", lambda p: optim.ASGD(p)
    yield "nadam", lambda p: optim.NAdam(p)
    yield "radam", lambda p: optim.RAdam(p)
    yield "rmsprop", lambda p: optim.RMSprop(p, momentum=0.5, centered=True)
    yield "rprop", lambda p: optim.Rprop(p)
    yield "adafactor", lambda p: optim.Adafactor(p)
    yield "muon", lambda p: optim.Muon([q for q in p if q.dim() == 2])
    yield "lbfgs", lambda p: optim.LBFGS(p, max_iter=3)


OPTIMIZERS = dict(factories())


def test_every_optimizer_of_this_torch_is_tested():
    covered = {type(make(make_net().parameters())).__name__ for make in OPTIMIZERS.values()}
    covered.add("SparseAdam")  # has a test of its own
    installed = {
        name
        for name, value in vars(torch.optim).items()
        if isinstance(value, type)
        and issubclass(value, torch.optim.Optimizer)
        and value is not torch.optim.Optimizer
    }
    assert installed == covered


def make_net():
    torch.manual_seed(4)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))


def train(net, optimizer, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(5, 4, generator=generator)

        def closure(x=x):
            optimizer.zero_grad()
            loss = net(x).pow(2).mean()
            loss.backward()
            return loss

        optimizer.step(closure)


def comparable_state(optimizer):
    """The state dict with tensors replaced by what identifies their values."""

    def flatten(value):
        if isinstance(value, torch.Tensor):
            value = value.to_dense() if value.is_sparse else value
            return (value.dtype, tuple(value.shape), value.tolist())
        if isinstance(value, dict):
            return {key: flatten(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [flatten(item) for item in value]
        return value

    return flatten(optimizer.state_dict())


def trained(make, steps, lr=None):
    net = make_net()
    optimizer = make(net.parameters())
    train(net, optimizer, steps, seed=3)
    if lr is not None:
        for group in optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
    return net, optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("others", ["fresh", "trained"])
def test_optimizer_state_becomes_the_roots(name, others):
    make = OPTIMIZERS[name]
    root = hvd.size() - 1
    is_root = hvd.rank() == root
    net, optimizer = (
        trained(make, steps=3, lr=0.0625)
        if is_root
        else trained(make, 1 if others == "trained" else 0)
    )
    weights = copy.deepcopy(net.state_dict())
    gradients = [None if p.grad is None else p.grad.clone() for p in net.parameters()]

    assert hvd.broadcast_optimizer_state(optimizer, root_rank=root) is None

    _, want = trained(make, steps=3, lr=0.0625)
    assert comparable_state(optimizer) == comparable_state(want)
    for key, value in net.state_dict().items():
        assert torch.equal(value, weights[key]), "a parameter moved"
    for parameter, before in zip(net.parameters(), gradients, strict=True):
        assert (parameter.grad is None) == (before is None)
        assert before is None or torch.equal(parameter.grad, before)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_alike_after_a_checkpoint_that_only_the_root_loaded(name):
    make = OPTIMIZERS[name]
    net, optimizer = trained(make, steps=2 if hvd.rank() == 0 else 0)
    if hvd.rank() == 0:
        checkpoint = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
        net = make_net()
        optimizer = make(net.parameters())
        net.load_state_dict(checkpoint[0])
        optimizer.load_state_dict(checkpoint[1])
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    train(net, optimizer, steps=2, seed=9)

    reference, reference_optimizer = trained(make, steps=2)
    train(reference, reference_optimizer, steps=2, seed=9)
    for (key, mine), want in zip(
        net.state_dict().items(), reference.state_dict().values(), strict=True
    ):
        assert torch.equal(mine, want), key


def test_tensors_that_fit_stay_the_same_objects():
    net, optimizer = trained(OPTIMIZERS["tensor_lr"], steps=hvd.rank() + 1)
    before = {
        (i, key): value
        for i, p in enumerate(net.parameters())
        for key, value in optimizer.state[p].items()
    }
    lr = optimizer.param_groups[0]["lr"]
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for i, p in enumerate(net.parameters()):
        for key, value in optimizer.state[p].items():
            assert value is before[i, key]
    assert optimizer.param_groups[0]["lr"] is lr


def test_state_that_the_root_lacks_is_dropped():
    net, optimizer = trained(OPTIMIZERS["momentum"], steps=hvd.rank())
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert not optimizer.state
    del net


def test_options_of_every_group_and_of_schedulers():
    net = make_net()
    first, *rest = net.parameters()
    scale = 1 if hvd.rank() == 0 else 100
    optimizer = torch.optim.SGD(
        [{"params": [first], "lr": 0.5 * scale, "note": f"rank {hvd.rank()}"}, {"params": rest}],
        lr=0.25 * scale,
        momentum=0.125 * scale,
    )
    if hvd.rank() == 0:
        torch.optim.lr_scheduler.StepLR(optimizer, 3)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]
    assert [group["initial_lr"] for group in optimizer.param_groups] == [0.5, 0.25]
    assert [group["momentum"] for group in optimizer.param_groups] == [0.125, 0.125]
    assert optimizer.param_groups[0]["note"] == "rank 0"
    assert optimizer.param_groups[0]["params"] == [first]


def test_one_learning_rate_shared_by_groups_stays_shared():
    net = make_net()
    first, *rest = net.parameters()
    lr = torch.tensor(0.1 * (hvd.rank() + 1), dtype=torch.float64)
    optimizer = torch.optim.Adam([{"params": [first]}, {"params": rest}], lr=lr)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    a, b = (group["lr"] for group in optimizer.param_groups)
    assert a is b
    assert a.item() == 0.1


def test_a_learning_rate_may_be_a_tensor_on_the_root_only():
    net = make_net()
    lr = torch.tensor(0.5) if hvd.rank() == 0 else 0.1
    optimizer = torch.optim.Adam(net.parameters(), lr=lr, foreach=False)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)
    assert optimizer.param_groups[0]["lr"].item() == 0.5


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SparseAdam(list(p), lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adagrad(p),
    ],
    ids=["SparseAdam", "SGD", "momentum", "Adagrad"],
)
def test_state_of_sparse_embeddings(make):
    def run(steps):
        torch.manual_seed(0)
        embedding = torch.nn.Embedding(6, 2, sparse=True)
        optimizer = make(embedding.parameters())
        for step in range(steps):
            optimizer.zero_grad()
            embedding(torch.tensor([step, step + 1])).sum().backward()
            optimizer.step()
        return embedding, optimizer

    embedding, optimizer = run(2 if hvd.rank() == 0 else 0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0, model=embedding)
    assert comparable_state(optimizer) == comparable_state(run(2)[1])


def test_state_is_laid_out_like_its_parameter():
    model = make_model(0, channels_last=True)
    optimizer = torch.optim.Adam(model.parameters())
    if hvd.rank() == 0:
        model(torch.randn(2, 3, 4, 4)).sum().backward()
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    weight = model[0].weight
    assert optimizer.state[weight]["exp_avg"].stride() == weight.stride()
    assert optimizer.state[weight]["exp_avg"].requires_grad is False


def test_complex_parameters_have_complex_state():
    def run(steps):
        parameter = torch.nn.Parameter(torch.tensor([1 + 2j, 3 - 1j]))
        optimizer = torch.optim.Adam([parameter])
        for _ in range(steps):
            parameter.grad = torch.tensor([1j, 2 + 0j])
            optimizer.step()
        return optimizer

    optimizer = run(2 if hvd.rank() == 0 else 0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert comparable_state(optimizer) == comparable_state(run(2))


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("before", [True, False])
def test_wrapped_optimizers(name, before):
    net = make_net()
    plain = OPTIMIZERS[name](net.parameters())
    if hvd.rank() == 0:
        train(net, plain, steps=2, seed=3)
        plain.param_groups[0]["lr"] = 0.75
    if before:
        hvd.broadcast_optimizer_state(plain, root_rank=0)
    wrapped = hvd.DistributedOptimizer(plain, named_parameters=net.named_parameters())
    if not before:
        hvd.broadcast_optimizer_state(wrapped, root_rank=0)
    _, want = trained(OPTIMIZERS[name], steps=2, lr=0.75)
    assert comparable_state(wrapped) == comparable_state(want)


def test_different_parameter_groups_are_an_error_on_every_rank():
    if hvd.size() == 1:
        pytest.skip("needs several ranks")
    net = make_net() if hvd.rank() != 1 else torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(
        ValueError, match=r"parameter groups of rank 1 have shapes .* those of rank 0"
    ):
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    still_works()
