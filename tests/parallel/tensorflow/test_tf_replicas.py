"""Replicas that never were equal, with `DistributedGradientTape` and optimizers of TensorFlow 1."""

import numpy as np
import pytest
import tensorflow as tf

import horovod.tensorflow as hvd
import replica_warnings
from horovod._keras._failures import as_horovod_error
from horovod.common import _replicas
from horovod.common.exceptions import ReplicasDifferError
from horovod.tensorflow._errors import as_horovod_errors
from replica_warnings import begin_again, check_named, end_failed

found = replica_warnings.found
# So many steps no job makes before rank 0 has all reports.
MANY = 500
# More than come before the report.
STEPS = 18
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
@pytest.mark.parametrize(("row", "is_seen"), [(0, True), (1, False), (2, True)])
def test_of_large_models_the_ends_are_compared(found, monkeypatch, row, is_seen, mode):
    monkeypatch.setattr(_replicas, "_WHOLE_BYTES_MAX", 0)
    monkeypatch.setattr(_replicas, "_BLOCK_BYTES", 16)
    model = Model(7, mode)
    model.shared[0][row].assign(tf.fill((4,), float(hvd.rank())))
    for _ in range(STEPS):
        model.step()
    if is_seen:
        check_named(found(), "'first:0'")
    else:
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


def test_gradients_may_be_added_up_before_the_first_step_and_its_broadcast(found):
    model = Model(hvd.rank(), "eagerly")
    for step in range(STEPS):
        sums = [tf.zeros_like(variable) for variable in model.shared]
        for _ in range(4):
            with tf.GradientTape() as tape:
                loss = model._loss()
            tape = hvd.DistributedGradientTape(tape)
            gradients = tape.gradient(loss, model.shared)
            sums = [a + b for a, b in zip(sums, gradients, strict=True)]
        for total, variable in zip(sums, model.shared, strict=True):
            variable.assign_sub(0.01 * total)
        if step == 0:
            hvd.broadcast_variables(model.shared, root_rank=0)
    assert found() == []


class Saved(tf.Module):
    def __init__(self):
        super().__init__()
        self.weight = tf.Variable([1.0, 2.0])

    @tf.function(input_signature=[])
    def step(self):
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(self.weight**2)
        [gradient] = tape.gradient(loss, [self.weight])
        self.weight.assign_sub(0.01 * gradient)
        return loss


@pytest.mark.parametrize("steps", [1, STEPS])
def test_a_module_with_its_training_step_can_be_saved_and_loaded(found, tmp_path, steps):
    module = Saved()
    for _ in range(steps):
        module.step()
    tf.saved_model.save(module, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    assert np.allclose(loaded.step(), module.step())
    assert found() == []


def test_sets_of_variables_that_are_counted_are_bounded(found):
    variables = [tf.Variable([1.0]) for _ in range(40)]
    for last in range(2, len(variables)):
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.add_n(variables)
        tape.gradient(loss, variables[:last])
    [sets] = [value for key, value in vars(variables[0]).items() if key.startswith("_hvd")]
    assert len(sets.by_variables) == len(sets.by_sources) == 16
    assert found() == []


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("corrupted record at 7 of Horovod-data.tfrecord", None),
        ("The ranks do not hold the same values [HorovodAllreduce]", ReplicasDifferError),
    ],
)
def test_a_damaged_file_is_no_difference_between_replicas(text, kind):
    error = tf.errors.DataLossError(None, None, text)
    failure = as_horovod_error(error)
    assert failure is None if kind is None else isinstance(failure, kind)
    with pytest.raises(kind or tf.errors.DataLossError), as_horovod_errors():
        raise error


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
