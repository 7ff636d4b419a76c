"""A state's own methods without `elastic.run`: a sync renews the snapshot, and half-made sums end."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import horovod.tensorflow as hvd
import horovod.tensorflow.keras
from horovod.tensorflow import elastic

v1 = tf.compat.v1
KERAS = {3: keras, 2: tf_keras}


def layer(generation):
    """One weight, 1 more than the rank."""
    made = KERAS[generation].Sequential([KERAS[generation].layers.Dense(1, use_bias=False)])
    made.build((None, 1))
    made.set_weights([np.full((1, 1), hvd.rank() + 1.0, np.float32)])
    return made


@pytest.mark.parametrize("generation", [3, 2])
def test_a_sync_renews_the_snapshot_of_a_keras_state(generation):
    net = layer(generation)
    state = elastic.TensorFlowKerasState(
        net, KERAS[generation].optimizers.SGD(1.0), batch=hvd.rank()
    )
    state.sync()
    net.set_weights([np.full((1, 1), 9.0, np.float32)])
    state.batch = 9
    state.restore()
    assert net.get_weights()[0].item() == 1.0
    assert state.batch == 0


def test_a_sync_renews_the_snapshot_of_variables():
    variable = tf.Variable(hvd.rank() + 1.0)
    state = elastic.TensorFlowState([variable], batch=hvd.rank())
    state.sync()
    variable.assign(9.0)
    state.restore()
    assert variable.numpy() == 1.0
    assert state.batch == 0


@pytest.mark.parametrize("how", ["reset", "restore", "sync"])
@pytest.mark.parametrize("wrapped", ["new", "legacy", "loss scale", "keras 3"])
def test_half_made_sums_end(wrapped, how):
    generation = 3 if wrapped == "keras 3" else 2
    net = layer(generation)
    kinds = {"legacy": tf_keras.optimizers.legacy}
    plain = kinds.get(wrapped, KERAS[generation].optimizers).SGD(1.0)
    if wrapped == "loss scale":
        plain = tf_keras.mixed_precision.LossScaleOptimizer(plain, dynamic=False, initial_scale=1.0)
    optimizer = horovod.tensorflow.keras.DistributedOptimizer(plain, backward_passes_per_step=2)
    state = elastic.TensorFlowKerasState(net, optimizer)
    weight = net.trainable_variables[0]

    def run_pass(gradient):
        if generation == 3:
            optimizer.apply([tf.fill((1, 1), gradient)], [weight])
        else:
            with tf.GradientTape() as tape:
                loss = gradient * tf.reduce_sum(weight)
            optimizer.minimize(loss, [weight], tape=tape)

    run_pass(0.0)
    run_pass(0.0)
    state.sync()
    before = net.get_weights()[0].item()
    run_pass(100.0)
    getattr(state, how)()
    run_pass(1.0)
    run_pass(1.0)
    assert net.get_weights()[0].item() - before == pytest.approx(-2.0)


@pytest.mark.parametrize("how", ["reset", "restore", "sync"])
def test_half_made_sums_of_a_session_end(how):
    with tf.Graph().as_default(), v1.Session() as session:
        weight = v1.get_variable("w", initializer=0.0, use_resource=True)
        factor = v1.placeholder(tf.float32, ())
        optimizer = hvd.DistributedOptimizer(
            v1.train.GradientDescentOptimizer(1.0), backward_passes_per_step=2
        )
        step = optimizer.minimize(factor * weight)
        session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
        state = elastic.TensorFlowState(session=session)
        session.graph.finalize()
        session.run(step, {factor: 100.0})
        getattr(state, how)()
        session.run(step, {factor: 1.0})
        session.run(step, {factor: 1.0})
        assert session.run(weight) == -2.0
