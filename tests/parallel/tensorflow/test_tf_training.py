"""Training on several ranks is training on one with the whole batch: the same losses, to float32 rounding."""

import numpy as np
import pytest
import tensorflow as tf

import horovod.tensorflow as hvd

STEPS, BATCH = 15, 24
# float32 sums in another order; measured differences are below 1e-6.
TOLERANCE = 1e-5


def digits():
    from sklearn.datasets import load_digits

    data = load_digits()
    return (data.data / 16.0).astype(np.float32), data.target.astype(np.int64)


def network():
    generator = np.random.default_rng(1)
    shapes = [(64, 32), (32,), (32, 10), (10,)]
    return [tf.Variable(generator.normal(0, 0.1, s).astype(np.float32)) for s in shapes]


def loss_of(weights, x, y):
    hidden = tf.nn.relu(x @ weights[0] + weights[1])
    logits = hidden @ weights[2] + weights[3]
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
    return tf.reduce_mean(losses)


def losses(own, make_tape, make_function):
    """The losses of the whole batch, step by step, when each step takes this part of it."""
    x, y = digits()
    weights = network()
    velocity = [tf.Variable(tf.zeros_like(w)) for w in weights]

    @make_function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(weights, x, y)
        for w, v, g in zip(weights, velocity, make_tape(tape).gradient(loss, weights), strict=True):
            v.assign(0.9 * v + g)
            w.assign_sub(0.1 * v)

    curve = []
    for i in range(STEPS):
        at = np.arange(i * BATCH, (i + 1) * BATCH)
        curve.append(float(loss_of(weights, x[at], y[at])))
        step(tf.constant(x[at[own]]), tf.constant(y[at[own]]))
    return curve


@pytest.mark.parametrize(
    "options", [{}, {"groups": 2}, {"gradient_predivide_factor": 2.0}], ids=str
)
@pytest.mark.parametrize("make_function", [lambda f: f, tf.function], ids=["eager", "function"])
def test_losses_are_those_of_one_rank_with_the_whole_batch(options, make_function):
    part = BATCH // hvd.size()
    own = slice(hvd.rank() * part, (hvd.rank() + 1) * part)
    together = losses(own, lambda t: hvd.DistributedGradientTape(t, **options), make_function)
    alone = losses(slice(None), lambda t: t, make_function)
    np.testing.assert_allclose(together, alone, rtol=TOLERANCE)
    assert together[-1] < 0.8 * together[0]
    assert hvd.allgather_object(together) == [together] * hvd.size()
