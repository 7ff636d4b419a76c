"""`horovod.mxnet`: training on several ranks equals training on all data in one process."""

import pickle
import warnings

import mxnet as mx
import numpy as np
import pytest

import horovod.mxnet as hvd
from horovod.mxnet import _operations, functions, mpi_ops
from horovod.mxnet import optimizer as optimizers

hvd.init()
SIZE, RANK = hvd.size(), hvd.rank()
BATCH, STEPS = 4, 5


several = pytest.mark.skipif(SIZE == 1, reason="nothing is sent")


@pytest.fixture(params=[True, False], ids=["full host", "spare cores"])
def cores(request, monkeypatch):
    """Whether the ranks fill their host: without groups that decides whether gradients go together."""
    monkeypatch.setattr(optimizers, "fills_its_host", lambda: request.param)
    return request.param


def data(step, rank):
    random = np.random.RandomState(1000 * step + rank)
    return random.rand(BATCH, 6).astype("float32"), random.rand(BATCH, 3).astype("float32")


def network():
    net = mx.gluon.nn.HybridSequential()
    net.add(mx.gluon.nn.Dense(5, in_units=6, activation="tanh"), mx.gluon.nn.Dense(3, in_units=5))
    net.initialize()
    for i, param in enumerate(net.collect_params().values()):
        values = np.random.RandomState(i).uniform(-1, 1, param.shape)
        param.set_data(mx.nd.array(values))
    return net


def train(net, trainer, batches, batch_size):
    loss_of = mx.gluon.loss.L2Loss()
    for batch in batches:
        x, y = (mx.nd.array(np.concatenate(part)) for part in zip(*batch, strict=True))
        with mx.autograd.record():
            loss = loss_of(net(x), y)
        loss.backward()
        trainer.step(batch_size)
    return weights(net)


def weights(net):
    return [p.data().asnumpy() for p in net.collect_params().values()]


def on_all_data(**options):
    """One process that has everybody's data."""
    net = network()
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", kvstore=None, **options)
    batches = [[data(step, rank) for rank in range(SIZE)] for step in range(STEPS)]
    return train(net, trainer, batches, BATCH * SIZE)


def mine():
    return [[data(step, RANK)] for step in range(STEPS)]


OPTIONS = {"learning_rate": 0.5, "momentum": 0.9, "wd": 0.01}


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("num_groups", [0, 1, 3, 9])
@pytest.mark.parametrize("predivide", [1.0, 2.0])
def test_the_trainer_equals_one_process(num_groups, predivide, hybrid):
    net = network()
    if hybrid:
        net.hybridize()
    trainer = hvd.DistributedTrainer(
        net.collect_params(),
        "sgd",
        OPTIONS,
        gradient_predivide_factor=predivide,
        num_groups=num_groups,
        prefix="t",
    )
    got = train(net, trainer, mine(), BATCH)
    for a, b in zip(got, on_all_data(optimizer_params=OPTIONS), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert trainer.learning_rate == 0.5
    for a, b in zip(hvd.allgather_object(got), [got] * SIZE, strict=True):
        assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_other_containers_of_parameters(kind):
    net = network()
    params = net.collect_params()
    params = dict(params.items()) if kind is dict else kind(params.values())
    if kind is not dict and RANK % 2:
        params = params[::-1]  # each position is named after the parameter
    got = train(net, hvd.DistributedTrainer(params, "sgd", OPTIONS), mine(), BATCH)
    for a, b in zip(got, on_all_data(optimizer_params=OPTIONS), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize("num_groups", [0, 2])
def test_compressed_gradients(num_groups):
    net = network()
    options = {"compression": hvd.Compression.fp16, "num_groups": num_groups}
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", OPTIONS, **options)
    got = train(net, trainer, mine(), BATCH)
    for a, b in zip(got, on_all_data(optimizer_params=OPTIONS), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-2)
    tensor, ctx = hvd.Compression.fp16.compress(mx.nd.ones((2,)))
    assert tensor.dtype == np.float16
    assert hvd.Compression.fp16.decompress(tensor, ctx).dtype == np.float32
    whole = mx.nd.ones((2,), dtype="int32")
    assert hvd.Compression.fp16.compress(whole)[0] is whole
    assert hvd.Compression.none.compress(whole)[0] is whole


def test_half_precision():
    param = mx.gluon.Parameter("w", shape=(3,), dtype="float16", init="zeros")
    param.initialize()
    options = {"learning_rate": 1.0, "multi_precision": True}
    trainer = hvd.DistributedTrainer([param], "sgd", options)
    for _ in range(2):
        with mx.autograd.record():
            loss = (param.data() * (RANK + 1)).sum()
        loss.backward()
        trainer.step(1)
    assert param.data().dtype == np.float16
    np.testing.assert_allclose(param.data().asnumpy(), -(SIZE + 1), rtol=1e-3)


def test_a_distributed_optimizer_given_to_the_trainer_is_unwrapped():
    net = network()
    wrapped = hvd.DistributedOptimizer(mx.optimizer.create("sgd", **OPTIONS))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer = hvd.DistributedTrainer(net.collect_params(), wrapped)
    assert any("unwrapped" in str(w.message) for w in seen)
    for a, b in zip(
        train(net, trainer, mine(), BATCH), on_all_data(optimizer_params=OPTIONS), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def module(optimizer, batch, batches):
    distributed = isinstance(optimizer, hvd.DistributedOptimizer)
    x = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=5, name="fc1")
    x = mx.sym.FullyConnected(mx.sym.Activation(x, act_type="tanh"), num_hidden=3, name="fc2")
    net = mx.mod.Module(mx.sym.LinearRegressionOutput(x, name="out"), label_names=["out_label"])
    net.bind([("data", (batch, 6))], [("out_label", (batch, 3))])
    shapes = {"fc1_weight": (5, 6), "fc1_bias": (5,), "fc2_weight": (3, 5), "fc2_bias": (3,)}
    random = np.random.RandomState(7)
    given = {k: mx.nd.array(random.rand(*s)) for k, s in shapes.items()}
    if distributed:
        given = {k: v + RANK for k, v in given.items()}
        hvd.broadcast_parameters(given)  # everybody begins with rank 0's
    net.init_params(arg_params=given)
    net.init_optimizer(kvstore=None, optimizer=optimizer)
    for step in batches:
        x, y = (mx.nd.array(np.concatenate(part)) for part in zip(*step, strict=True))
        net.forward_backward(mx.io.DataBatch([x], [y]))
        net.update()
    return {k: v.asnumpy() for k, v in net.get_params()[0].items()}


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize("num_groups", [0, 2])
@pytest.mark.parametrize("name", ["sgd", "adam", "nag", "lamb"])
def test_the_optimizer_in_a_module_equals_one_process(name, num_groups):
    options = {"learning_rate": 0.05, "wd": 0.01}

    def create(batch):
        return mx.optimizer.create(name, rescale_grad=1.0 / batch, **options)

    optimizer = hvd.DistributedOptimizer(create(BATCH), num_groups=num_groups)
    optimizer.set_lr_mult({"fc1_weight": 0.5})
    got = module(optimizer, BATCH, mine())
    plain = create(BATCH * SIZE)
    plain.set_lr_mult({"fc1_weight": 0.5})
    want = module(plain, BATCH * SIZE, [[data(s, r) for r in range(SIZE)] for s in range(STEPS)])
    for key in want:
        np.testing.assert_allclose(got[key], want[key], rtol=2e-3, atol=1e-5, err_msg=key)


def test_the_optimizer_looks_like_the_one_it_wraps():
    plain = mx.optimizer.create("sgd", rescale_grad=0.25, learning_rate=0.5)
    optimizer = hvd.DistributedOptimizer(plain, gradient_predivide_factor=2.0)
    assert isinstance(optimizer, mx.optimizer.Optimizer)
    makes_averages = 2 / SIZE if SIZE > 1 else 1
    assert optimizer.rescale_grad == pytest.approx(0.25)
    assert plain.rescale_grad == 0.25 * makes_averages
    optimizer.rescale_grad = 0.5
    assert plain.rescale_grad == 0.5 * makes_averages
    optimizer.set_learning_rate(0.125)
    assert plain.lr == optimizer.learning_rate == 0.125
    optimizer.idx2name = {0: "w"}
    assert plain.idx2name == {0: "w"}
    assert optimizer.momentum == plain.momentum
    with pytest.raises(AttributeError):
        optimizer.no_such_thing  # noqa: B018
    assert pickle.loads(pickle.dumps(optimizer)).rescale_grad == pytest.approx(0.5)
    weight, grad = mx.nd.zeros((3,)), mx.nd.full((3,), RANK + 1)
    optimizer.update(7, weight, grad, optimizer.create_state(7, weight))
    total = SIZE * (SIZE + 1) / 2
    np.testing.assert_allclose(weight.asnumpy(), -0.125 * 0.5 * total / SIZE, rtol=1e-6)


def test_members_of_a_process_set_train_together():
    if SIZE < 3:
        pytest.skip("needs three ranks")
    hvd.shutdown()
    pair = hvd.ProcessSet([0, 2])
    hvd.init(process_sets=[pair])
    try:
        net = network()
        trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", OPTIONS, process_set=pair)
        got = hvd.allgather_object(train(net, trainer, mine(), BATCH))
        assert all(np.array_equal(a, b) for a, b in zip(got[0], got[2], strict=True))
        assert not all(np.array_equal(a, b) for a, b in zip(got[0], got[1], strict=True))
    finally:
        hvd.shutdown()
        hvd.init()


@pytest.mark.parametrize("root", [0, SIZE - 1])
def test_parameters_of_a_block(root):
    net = network()
    for param in net.collect_params().values():
        param.set_data(param.data() + RANK)
    hvd.broadcast_parameters(net.collect_params(), root_rank=root, prefix="block.")
    for a, b in zip(weights(net), weights(network()), strict=True):
        assert np.array_equal(a, b + np.float32(root))


def test_parameters_without_a_shape_yet():
    mx.random.seed(RANK)
    net = mx.gluon.nn.HybridSequential()
    net.add(mx.gluon.nn.Conv2D(4, 3), mx.gluon.nn.BatchNorm(), mx.gluon.nn.Dense(3))
    net.initialize(mx.init.Uniform(1.0))
    hvd.broadcast_parameters(net.collect_params())
    net(mx.nd.ones((2, 3, 8, 8)))
    got = hvd.allgather_object(weights(net))
    for others in got:
        assert all(np.array_equal(a, b) for a, b in zip(others, got[0], strict=True))
    assert any(a.std() > 0 for a in got[0])


def test_parameters_after_inference():
    """Then MKL-DNN holds the weights of convolutions in an order of its own."""
    net = mx.gluon.nn.Conv2D(32, 3, in_channels=16)
    net.initialize(mx.init.Uniform(1.0))
    mx.random.seed(RANK)
    net.initialize(mx.init.Uniform(1.0), force_reinit=True)
    net(mx.nd.ones((2, 16, 8, 8))).wait_to_read()
    hvd.broadcast_parameters(net.collect_params())
    got = hvd.allgather_object(weights(net))
    assert all(np.array_equal(a, b) for other in got for a, b in zip(other, got[0], strict=True))


def test_bad_arguments():
    with pytest.raises(ValueError, match="invalid params of type: <class 'list'>"):
        hvd.broadcast_parameters([mx.nd.ones((2,))])
    with pytest.raises(AssertionError, match="prefix"):
        hvd.broadcast_parameters({}, prefix=3)
    params = network().collect_params()
    with pytest.raises(AssertionError, match="prefix"):
        hvd.DistributedTrainer(params, "sgd", prefix=3)
    net = mx.gluon.nn.Dense(3, in_units=2)
    net.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
    with pytest.raises(ValueError, match="one device per process"):
        hvd.DistributedTrainer(net.collect_params(), "sgd")


class Sent(list):
    """The names and priorities of operations, which are carried out if `also` does so."""

    def record(self, monkeypatch, also=None):
        def push(kind, prefix, name, inputs, outputs, process_set, priority, **options):
            self.append((f"{prefix}.{name}", priority))
            if also:
                also(kind, prefix, name, inputs, outputs, process_set, priority, **options)

        monkeypatch.setattr(_operations, "push", push)


@several
def test_names_of_gradients(monkeypatch, cores):
    sent = Sent()
    sent.record(monkeypatch)
    trainer = hvd.DistributedTrainer(network().collect_params(), "sgd", prefix="x.")
    trainer._params[1].grad_req = "null"
    trainer.allreduce_grads()
    alone = [("x.0", 0), ("x.2", -1), ("x.3", -2)]
    if not cores:
        assert sent == [(f"horovod_allreduce.{name}", priority) for name, priority in alone]
        return
    ((name, priority),) = sent
    assert (name.split("#")[0], priority) == ("horovod_grouped_allreduce.x.0:x.3", 0)
    # Ranks that have gradients of other parameters, as many of the same shapes, must not meet.
    trainer._params[1].grad_req, trainer._params[2].grad_req = "write", "null"
    trainer.allreduce_grads()
    assert sent[1][0].split("#")[0] == name.split("#")[0]
    assert sent[1] != sent[0]
    assert hvd.allgather_object(list(sent)) == [list(sent)] * SIZE


def gradients_of(params, **options):
    """The bytes of gradients of several types after the trainer has reduced them."""
    trainer = hvd.DistributedTrainer(params, "sgd", **options)
    for i, param in enumerate(params):
        random = np.random.RandomState(100 * i + RANK)
        param.grad()[:] = mx.nd.array(random.randn(*param.shape), dtype=param.dtype)
    trainer.allreduce_grads()
    return [param.grad().asnumpy().tobytes() for param in params]


@several
def test_gradients_together_are_those_one_by_one_to_the_bit(monkeypatch):
    types = ["float32", "float16", "float32", "float64", "float16", "float32"]
    params = [mx.gluon.Parameter(f"w{i}", shape=(i, 501), dtype=t) for i, t in enumerate(types, 1)]
    for param in params:
        param.initialize()
    send, found = _operations.push, []
    for full in (True, False):
        monkeypatch.setattr(optimizers, "fills_its_host", lambda full=full: full)
        for options in ({}, {"compression": hvd.Compression.fp16}):
            sent = Sent()
            sent.record(monkeypatch, also=send)
            found.append(gradients_of(params, gradient_predivide_factor=3.0, **options))
            assert len(sent) == ((1 if options else 3) if full else len(params))
    assert found[0] == found[2]
    assert found[1] == found[3]
    assert hvd.allgather_object(found) == [found] * SIZE


@several
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_a_module_hands_its_gradients_over_together(monkeypatch, cores, name):
    sent, send = Sent(), _operations.push
    sent.record(monkeypatch, also=send)
    module(hvd.DistributedOptimizer(mx.optimizer.create(name)), BATCH, mine()[:1])
    kinds = [text.split(".")[0] for text, _ in sent if "broadcast" not in text]
    assert kinds == (["horovod_grouped_allreduce"] if cores else ["horovod_allreduce"] * 4)


class CountingSgd(mx.optimizer.SGD):
    """Notes how many gradients it is given at once."""

    def __init__(self, at_once, **options):
        super().__init__(**options)
        self.aggregate_num, self.seen = at_once, []

    def update_multi_precision(self, index, weight, grad, state):
        self.seen.append(len(index) if isinstance(index, tuple) else None)
        super().update_multi_precision(index, weight, grad, state)


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize(
    ("at_once", "seen"), [(0, [None] * 4), (1, [1] * 4), (3, [3, 1]), (9, [4])]
)
def test_the_wrapped_optimizer_gets_as_many_gradients_at_once_as_it_takes(at_once, seen):
    plain = CountingSgd(at_once)
    module(hvd.DistributedOptimizer(plain), BATCH, mine()[:1])
    assert plain.seen == seen


@several
@pytest.mark.usefixtures("cores")
def test_a_rank_without_data_joins_while_others_step():
    param = mx.gluon.Parameter("w", shape=(2,), init="zeros")
    other = mx.gluon.Parameter("x", shape=(3,), init="zeros")
    for one in (param, other):
        one.initialize()
    trainer = hvd.DistributedTrainer([param, other], "sgd", {"learning_rate": 1.0}, prefix="j")
    for _ in range(1 if RANK == 0 else 2):
        with mx.autograd.record():
            loss = param.data().sum() + other.data().sum()
        loss.backward()
        trainer.step(1)
    hvd.join()
    # The second step averages over all ranks, of which the first gave nothing.
    steps = 1 if RANK == 0 else 1 + (SIZE - 1) / SIZE
    for one in (param, other):
        np.testing.assert_allclose(one.data().asnumpy(), -steps, rtol=1e-6)


def test_modules():
    assert functions.broadcast_parameters is hvd.broadcast_parameters
    assert functions.broadcast_object is hvd.broadcast_object
    assert mpi_ops.rank() == RANK
