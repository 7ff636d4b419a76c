"""States of elastic training with TensorFlow, and which errors mean that a rank was lost."""

import numpy as np
import pytest
import tensorflow as tf

import horovod.tensorflow as hvd
from horovod.tensorflow import elastic

v1 = tf.compat.v1


def model(generation=3, built=True):
    import keras
    import tf_keras

    layers = (keras if generation == 3 else tf_keras).layers
    made = (keras if generation == 3 else tf_keras).Sequential(
        [layers.Dense(2), layers.Dropout(0.5)]
    )
    if built:
        made.build((None, 3))
        for variable in made.trainable_variables:
            variable.assign(tf.fill(variable.shape, hvd.rank() + 1.0))
    return made


def optimizer(generation):
    import keras
    import tf_keras

    return (keras if generation == 3 else tf_keras).optimizers.Adam(0.1)


def values(thing):
    variables = thing.variables
    return [np.array(v.numpy()) for v in (variables() if callable(variables) else variables)]


def same(some, others):
    for one, other in zip(some, others, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("generation", [3, 2])
def test_a_keras_state_is_saved_restored_and_synced(generation):
    net, opt = model(generation), optimizer(generation)
    if hvd.rank() == 0:  # the others have an optimizer without variables
        grads = [tf.ones(v.shape) for v in net.trainable_variables]
        opt.apply_gradients(zip(grads, net.trainable_variables, strict=True))
    state = elastic.TensorFlowKerasState(net, opt, epoch=hvd.rank(), extra=[hvd.rank()])
    assert state.model is net
    assert state.optimizer is opt
    state.sync()
    assert (state.epoch, state.extra) == (0, [0])
    weights = [v.numpy() for v in net.weights]
    same(weights, hvd.broadcast_object(weights, 0))
    same(values(opt), hvd.broadcast_object(values(opt), 0))
    if generation == 3:
        assert len(values(opt)) > 4, "its moments are there"

    state.save()
    before, moments = values(net), values(opt)
    for _ in range(2):
        grads = [tf.ones(v.shape) for v in net.trainable_variables]
        opt.apply_gradients(zip(grads, net.trainable_variables, strict=True))
        state.epoch = 7
        assert any((a != b).any() for a, b in zip(values(net), before, strict=True))
        state.restore()
        same(values(net), before)
        same(values(opt), moments)
        assert state.epoch == 0


def test_the_models_optimizer_is_the_default_and_it_has_to_be_built():
    net = model()
    net.compile(optimizer(3), "mse")
    assert elastic.TensorFlowKerasState(net).optimizer is net.optimizer
    with pytest.raises(
        ValueError, match=r"Model must be built first. Run `model.build\(input_shape\)`"
    ):
        elastic.TensorFlowKerasState(model(built=False))


def test_random_generators_are_restored_and_not_shared():
    net = model()
    state = elastic.TensorFlowKerasState(net)
    x = tf.ones((8, 3))
    state.save()
    first = net(x, training=True)
    state.restore()
    np.testing.assert_array_equal(net(x, training=True), first)


def test_numbers_of_variables_that_differ_are_told():
    if hvd.size() == 1:
        pytest.skip("needs several ranks")
    variables = [tf.Variable(1.0)] * (1 + (hvd.rank() == 0))
    with pytest.raises(ValueError, match=r"different numbers of variables on the ranks: \[2, 1"):
        elastic.TensorFlowState(variables).sync()


def test_a_state_of_variables_eagerly():
    variables = [tf.Variable([float(hvd.rank())]), tf.Variable(hvd.rank())]
    state = elastic.TensorFlowState(variables, batch=hvd.rank())
    for _ in range(2):  # also the second time
        variables[0].assign([hvd.rank() + 5.0])
        state.sync()
        assert variables[0].numpy() == [5.0]
        assert state.batch == 0
    state.save()
    variables[0].assign([9.0])
    state.restore()
    assert variables[0].numpy() == [5.0]


def test_a_state_of_a_session_whose_graph_is_finalized():
    with tf.Graph().as_default(), v1.Session() as session:
        w = v1.get_variable("w", initializer=float(hvd.rank()))
        more = tf.assign_add(w, 1.0) if hasattr(tf, "assign_add") else w.assign_add(1.0)
        session.run(v1.global_variables_initializer())
        state = elastic.TensorFlowState(session=session, batch=hvd.rank())
        session.graph.finalize()
        state.sync()
        state.save()
        assert session.run(w) == 0.0
        session.run(more)
        state.restore()
        assert session.run(w) == 0.0
        assert state.batch == 0


def test_run_calls_the_function_with_a_synced_state():
    state = elastic.TensorFlowState([tf.Variable(float(hvd.rank()))], batch=0)

    @elastic.run
    def train(state, word):
        for _ in range(3):
            state.batch += 1
            state.commit()
        return word, state.batch, state.variables[0].numpy()

    assert train(state, "done") == ("done", 3, 0.0)


def test_failures_of_our_operations_are_recognised():
    """Ranks that disagree go back to the last commit, and give up when that does not help."""
    if hvd.size() == 1:
        pytest.skip("needs several ranks")
    state = elastic.TensorFlowState([tf.Variable(0.0)], tries=0)
    tried = []

    for compute in (lambda f: f, tf.function):
        operations = [
            lambda x: hvd.allreduce(x, op=hvd.Sum, name="a"),
            lambda x: hvd.grouped_allreduce([x, x], op=hvd.Sum),
            lambda x: hvd.reducescatter(x, op=hvd.Sum),
            lambda x: hvd.broadcast(x, 0, name="plain"),
        ]
        for operation in operations:
            step = compute(operation)

            @elastic.run
            def train(state, step=step):
                tried.append(1)
                if len(tried) % 2:
                    step(tf.ones((hvd.size(), 1 + hvd.rank())))
                return "recovered"

            tried.clear()
            assert train(state) == "recovered"
            assert len(tried) == 2


def test_other_errors_are_the_scripts():
    state = elastic.TensorFlowState([tf.Variable(0.0)])

    @elastic.run
    def train(state):
        raise tf.errors.UnknownError(None, None, "the file system said so")

    with pytest.raises(tf.errors.UnknownError, match="file system"):
        train(state)
    hvd.allreduce(tf.ones(1))
