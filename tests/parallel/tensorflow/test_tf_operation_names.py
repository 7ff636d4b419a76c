"""Names of operations in graphs follow from the script's calls, not from what a process has made before."""

import pytest
import tensorflow as tf

import horovod.tensorflow as hvd
from horovod.tensorflow import _gradient_reduction


def _model():
    import keras

    return keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(4),
            hvd.SyncBatchNormalization(),
            keras.layers.Dense(1),
        ]
    )


def _names(function, *args):
    graph = function.get_concrete_function(*args).graph
    names = [op.name for op in graph.get_operations() if op.type.startswith("Horovod")]
    assert names or hvd.size() == 1
    return sorted(names)


@pytest.mark.parametrize("is_together", [False, True])
def test_the_names_of_a_step_are_alike_on_ranks_that_have_made_other_layers(
    monkeypatch, is_together
):
    monkeypatch.setattr(_gradient_reduction, "fills_its_host", lambda: is_together)
    for _ in range(hvd.rank()):
        _model()
    model = _model()

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x, training=True) ** 2)
        return hvd.DistributedGradientTape(tape).gradient(loss, model.trainable_variables)

    mine = _names(step, tf.ones((4, 3)))
    assert hvd.allgather_object(mine) == [mine] * hvd.size()
    step(tf.ones((4, 3)))


def test_the_names_of_variables_that_are_broadcast_in_a_graph_are_alike():
    variables = [tf.Variable(float(i), name=f"layer_{hvd.rank()}") for i in range(2)]

    @tf.function
    def spread():
        hvd.broadcast_variables(variables, 0, inplace=True)

    mine = _names(spread)
    assert hvd.allgather_object(mine) == [mine] * hvd.size()


@pytest.mark.parametrize(
    "kind", [tf.compat.v1.train.AdamOptimizer, tf.compat.v1.train.MomentumOptimizer]
)
@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
def test_the_names_of_gradients_do_not_depend_on_the_optimizers_class(kind, op):
    options = {} if kind is tf.compat.v1.train.AdamOptimizer else {"momentum": 0.5}
    with tf.Graph().as_default() as graph:
        weight = tf.compat.v1.get_variable("weight", initializer=tf.ones((3,)), use_resource=True)
        optimizer = hvd.DistributedOptimizer(kind(0.1, **options), op=op)
        optimizer.minimize(tf.reduce_sum(weight * weight))
    names = [node.name for node in graph.get_operations() if node.type.startswith("Horovod")]
    assert len(names) == (hvd.size() > 1)
    assert not any("Adam" in name or "Momentum" in name for name in names)
