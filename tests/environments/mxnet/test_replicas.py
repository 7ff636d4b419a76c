"""Replicas that never were equal, with Gluon's trainer and with an optimizer alone."""

import mxnet as mx
import pytest

import horovod.mxnet as hvd
import replica_warnings
from horovod.common import _replicas
from replica_warnings import begin_again, check_named, end_failed

hvd.init()
found = replica_warnings.found
# So many steps no job makes before rank 0 has all reports.
MANY = 500


def train(seed, steps=3, is_broadcast=False):
    mx.random.seed(seed)
    net = mx.gluon.nn.Sequential(prefix="net_")
    with net.name_scope():
        net.add(mx.gluon.nn.Dense(4), mx.gluon.nn.Dense(2))
    net.initialize(mx.init.Normal(0.1))
    params = net.collect_params()
    if is_broadcast:
        hvd.broadcast_parameters(params, root_rank=0)
    trainer = hvd.DistributedTrainer(params, "sgd", {"learning_rate": 0.01})
    for _ in range(steps):
        with mx.autograd.record():
            loss = net(mx.nd.ones((2, 3))).sum()
        loss.backward()
        trainer.step(2)
    mx.nd.waitall()


def update(seed, steps=3, is_broadcast=False):
    mx.random.seed(seed)
    optimizer = hvd.DistributedOptimizer(mx.optimizer.SGD(learning_rate=0.01))
    weights = [mx.nd.random.normal(shape=shape) for shape in ((3, 4), (4,))]
    if is_broadcast:
        hvd.broadcast_parameters({str(i): w for i, w in enumerate(weights)}, root_rank=0)
    grads = [mx.nd.ones(weight.shape) for weight in weights]
    states = [optimizer.create_state(i, weight) for i, weight in enumerate(weights)]
    for _ in range(steps):
        for i in (1, 0):
            optimizer.update(i, weights[i], grads[i], states[i])
    mx.nd.waitall()


@pytest.mark.parametrize(("job", "name"), [(train, "net_dense0_weight"), (update, "0")])
def test_a_forgotten_broadcast_is_named_with_the_tensor(found, job, name):
    job(hvd.rank())
    check_named(
        found(),
        f"'{name}' differs between rank 0, rank 1",
        "hvd.broadcast_parameters(params, root_rank=0)",
    )


@pytest.mark.parametrize("job", [train, update])
def test_a_broadcast_is_enough(found, job):
    job(hvd.rank(), is_broadcast=True)
    assert found() == []


def test_an_optimizer_of_an_earlier_version_can_be_loaded(found):
    optimizer = hvd.DistributedOptimizer(mx.optimizer.SGD(learning_rate=0.01))
    state = optimizer.__getstate__()
    del state["_first_round"]
    loaded = optimizer.__class__.__new__(optimizer.__class__)
    loaded.__setstate__(state)
    loaded.update(0, mx.nd.ones((2,)), mx.nd.ones((2,)), None)
    assert found() == []


def test_weights_are_not_read_if_replicas_are_not_checked(found, monkeypatch):
    monkeypatch.setenv("HOROVOD_CHECK_REPLICAS", "off")
    begin_again()
    monkeypatch.setattr(_replicas, "checksum_of", lambda arrays: pytest.fail("a weight is read"))
    update(hvd.rank())
    monkeypatch.undo()
    assert found() == []


def test_weights_that_were_noted_in_a_job_that_is_over_are_not_reported(found):
    optimizer = hvd.DistributedOptimizer(mx.optimizer.SGD(learning_rate=0.01))
    weight, grad = mx.nd.full((2,), float(hvd.rank())), mx.nd.ones((2,))
    optimizer.update(0, weight, grad, None)
    begin_again()
    hvd.broadcast_parameters({"0": weight}, root_rank=0)
    for _ in range(2):
        optimizer.update(0, weight, grad, None)
    assert found() == []


def test_as_an_error_it_ends_the_steps_of_every_rank(found, monkeypatch):
    monkeypatch.setenv("HOROVOD_CHECK_REPLICAS", "error")
    begin_again()
    with pytest.raises(mx.base.MXNetError, match="'net_dense0_weight' differs"):
        train(hvd.rank(), steps=MANY)
    monkeypatch.delenv("HOROVOD_CHECK_REPLICAS")
    end_failed()
