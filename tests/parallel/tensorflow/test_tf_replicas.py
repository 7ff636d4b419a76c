"""Replicas that never were equal, with `DistributedGradientTape` and optimizers of TensorFlow 1."""

import pytest
import tensorflow as tf

import horovod.tensorflow as hvd
import replica_warnings
from replica_warnings import begin_again, check_named, end_failed

found = replica_warnings.found
# So many steps no job makes before rank 0 has all reports.
MANY = 500
STEPS = 4
MODES = pytest.mark.parametrize("mode", ["eagerly", "in a function", "TensorFlow 1", "Adasum"])


class Model:
    def __init__(self, seed, mode):
        tf.random.set_seed(seed)
        self.shared = [
            tf.Variable(tf.random.normal(shape, seed=1), name=name)
            for name, shape in (("first", (3, 4)), ("last", (4, 2)))
        ]
        self.own = tf.Variable(tf.random.normal((2, 2)), name="own")
        self.optimizer = None
        if mode in ("TensorFlow 1", "Adasum"):
            op = hvd.Adasum if mode == "Adasum" else hvd.Average
            plain = tf.compat.v1.train.GradientDescentOptimizer(0.01)
            self.optimizer = hvd.DistributedOptimizer(plain, op=op)
        self.step = tf.function(self._step) if mode == "in a function" else self._step

    def _loss(self):
        first, last = self.shared
        return tf.reduce_sum(tf.ones((2, 3)) @ first @ last @ self.own)

    def _step(self):
        if self.optimizer is not None:
            self.optimizer.minimize(self._loss, var_list=self.shared)
            return
        with tf.GradientTape() as tape:
            loss = self._loss()
        tape = hvd.DistributedGradientTape(tape)
        tape.register_local_source(self.own)
        variables = [*self.shared, self.own]
        for gradient, variable in zip(tape.gradient(loss, variables), variables, strict=True):
            variable.assign_sub(0.01 * gradient)


@MODES
def test_a_forgotten_broadcast_is_named_with_the_tensor(found, mode):
    model = Model(hvd.rank(), mode)
    for _ in range(STEPS):
        model.step()
    check_named(found(), "'first:0' differs between rank 0, rank 1", "hvd.broadcast_variables(")


@MODES
def test_a_broadcast_after_the_first_step_is_enough_and_local_variables_may_differ(found, mode):
    model = Model(hvd.rank(), mode)
    for step in range(STEPS):
        model.step()
        if step == 0:
            hvd.broadcast_variables(model.shared, root_rank=0)
    assert found() == []


@MODES
def test_every_generation_is_looked_at(found, mode):
    model = Model(7, mode)
    for _ in range(STEPS):
        model.step()
    assert found() == []
    model.shared[0].assign_add(tf.fill((3, 4), float(hvd.rank())))
    for _ in range(STEPS):
        model.step()
    check_named(found(), "'first:0'")


def test_steps_in_a_loop_of_a_function_are_not_looked_at(found):
    model = Model(hvd.rank(), "in a function")

    @tf.function
    def steps():
        for _ in tf.range(STEPS):
            model.step()

    steps()
    hvd.broadcast_variables(model.shared, root_rank=0)
    steps()
    assert found() == []


def test_as_an_error_it_ends_the_steps_of_every_rank(found, monkeypatch):
    monkeypatch.setenv("HOROVOD_CHECK_REPLICAS", "error")
    begin_again()
    model = Model(hvd.rank(), "in a function")
    with pytest.raises(tf.errors.DataLossError, match="'first:0' differs"):
        for _ in range(MANY):
            model.step()
    monkeypatch.delenv("HOROVOD_CHECK_REPLICAS")
    end_failed()
