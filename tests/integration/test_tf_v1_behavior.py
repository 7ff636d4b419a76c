"""TensorFlow 1 as it was: `disable_v2_behavior()`, so reference variables and the older control flow."""

from __future__ import annotations

import harness

SCRIPT = """
import numpy as np
import tensorflow.compat.v1 as tf

import horovod.tensorflow as hvd

tf.disable_v2_behavior()
hvd.init()
factors = [rank + 1.0 for rank in range(hvd.size())]
mine = factors[hvd.rank()]


def trained(steps=4, **options):
    tf.reset_default_graph()
    x = tf.placeholder(tf.float32, ())
    w = tf.get_variable("w", initializer=[1.0, 2.0])
    table = tf.get_variable("table", initializer=np.zeros((3, 2), np.float32))
    assert type(w).__name__ == "RefVariable"
    loss = tf.reduce_sum(w) * x + tf.reduce_sum(tf.gather(table, [0, 1 + hvd.rank() % 2]))
    optimizer = hvd.DistributedOptimizer(tf.train.GradientDescentOptimizer(0.1), **options)
    step = tf.train.get_or_create_global_step()
    train = optimizer.minimize(loss, global_step=step)
    hooks = [hvd.BroadcastGlobalVariablesHook(0)]
    with tf.train.MonitoredTrainingSession(hooks=hooks) as session:
        for i in range(steps):
            session.run(train, {x: (i + 1) * mine})
        results = session.run([w, table, step])
    assert results[2] == steps
    for other in hvd.allgather_object(results[:2]):
        for one, own in zip(other, results):
            np.testing.assert_array_equal(one, own)
    return results


def check(got, move):
    np.testing.assert_allclose(got, np.array([1.0, 2.0]) - 0.1 * move, rtol=1e-5, atol=1e-6)


mean = np.mean(factors)
check(trained()[0], 10 * mean)
w, table, _ = trained(backward_passes_per_step=2, sparse_as_dense=True)
check(w, 10 * mean)
np.testing.assert_allclose(table[0], [-0.4, -0.4], rtol=1e-5)
check(trained(backward_passes_per_step=2, sparse_as_dense=True, average_aggregated_gradients=True)[0], 5 * mean)
for passes in (1, 2):
    # Parallel vectors a and 2a become 1.5a.
    check(trained(op=hvd.Adasum, backward_passes_per_step=passes)[0], 10 * 1.5)
print("all is well", flush=True)
"""


def test_optimizers_with_reference_variables_and_the_older_control_flow(script, jobs) -> None:
    job = jobs(harness.python(2, script(SCRIPT), env={"TF_CPP_MIN_LOG_LEVEL": "3"})).succeed()
    assert job.stdout.count("all is well") == 2
