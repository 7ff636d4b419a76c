"""Distributed optimizers of TensorFlow 1: eagerly, in functions, in sessions; several passes per step; Adasum."""

import numpy as np
import pytest
import tensorflow as tf

import horovod.tensorflow as hvd

v1 = tf.compat.v1


def loss_of(w, b, rank):
    return tf.reduce_sum(w * w) * (rank + 1.0) + b * (rank + 1.0)


def trained(mode, make, steps=3):
    """Variables after some steps with the optimizer that `make` gives."""
    if mode == "session":
        with tf.Graph().as_default(), v1.Session() as session:
            w, b = (
                v1.get_variable("w", initializer=[1.0, 2.0]),
                v1.get_variable("b", initializer=0.5),
            )
            train = make([w, b]).minimize(loss_of(w, b, hvd.rank()))
            session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
            for _ in range(steps):
                session.run(train)
            return [np.array(value) for value in session.run([w, b])]
    w, b = tf.Variable([1.0, 2.0]), tf.Variable(0.5)
    optimizer = make([w, b])

    def step():
        optimizer.minimize(lambda: loss_of(w, b, hvd.rank()), var_list=[w, b])

    called = tf.function(step) if mode == "function" else step
    for _ in range(steps):
        called()
    return [w.numpy(), b.numpy()]


def expected(steps=3, rate=0.1, factor=None):
    factor = np.mean([r + 1.0 for r in range(hvd.size())]) if factor is None else factor
    w, b = np.array([1.0, 2.0]), 0.5
    for _ in range(steps):
        w, b = w - rate * 2 * w * factor, b - rate * factor
    return [w, b]


def close(got, want, rtol=1e-5):
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=rtol)


MODES = ["eager", "function", "session"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_predivide_factor": 2.0}, {"groups": 1}, {"compression": hvd.Compression.fp16}],
    ids=str,
)
def test_steps_are_those_of_the_averaged_gradient(mode, options):
    def make(_):
        return hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.1), **options)

    close(trained(mode, make), expected(), 1e-3 if "compression" in options else 1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_groups_of_variables_and_local_ones(mode):
    def make(vars):
        optimizer = hvd.DistributedOptimizer(
            v1.train.GradientDescentOptimizer(0.1), groups=[list(vars)], op=hvd.Sum
        )
        optimizer.register_local_var(vars[1])
        return optimizer

    w, b = trained(mode, make)
    want_w, _ = expected(factor=sum(r + 1.0 for r in range(hvd.size())))
    _, want_b = expected(factor=(hvd.rank() + 1.0) / hvd.size())
    np.testing.assert_allclose(w, want_w, rtol=1e-5)
    np.testing.assert_allclose(b, want_b, rtol=1e-5)


@pytest.mark.parametrize("averaged", [False, True])
def test_several_passes_per_step_in_a_session(averaged):
    passes = 3
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float32, ())
        w = v1.get_variable("w", initializer=[1.0, 2.0])
        local = v1.get_variable("local", initializer=0.0)
        unused = v1.get_variable("unused", initializer=1.0)
        optimizer = hvd.DistributedOptimizer(
            v1.train.MomentumOptimizer(0.1, 0.0),
            backward_passes_per_step=passes,
            average_aggregated_gradients=averaged,
        )
        optimizer.register_local_var(local)
        step = v1.train.get_or_create_global_step()
        loss = tf.reduce_sum(w) * x + local * x
        train = optimizer.minimize(loss, global_step=step, var_list=[w, unused, local])
        session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
        total, history = np.zeros(2), []
        for i in range(2 * passes):
            value = (i + 1.0) * (hvd.rank() + 1.0)
            session.run(train, {x: value})
            history.append(session.run([w, local]))
            assert session.run(step) == i + 1, "every pass counts"
        del total
        sums = [sum(i + 1.0 for i in part) for part in (range(passes), range(passes, 2 * passes))]
        mean = np.mean([r + 1.0 for r in range(hvd.size())])
        share = passes if averaged else 1
        for i, (got, own) in enumerate(history):
            done = sum(sums[: (i + 1) // passes]) / share
            np.testing.assert_allclose(got, np.array([1.0, 2.0]) - 0.1 * mean * done, rtol=1e-5)
            mine = (hvd.rank() + 1.0) / hvd.size() * done
            np.testing.assert_allclose(own, -0.1 * mine, rtol=1e-5)
        assert session.run(unused) == 1.0
        names = {variable.name for variable in v1.local_variables()}
        assert any("aggregation_counter" in name for name in names)
        assert not any("aggregation" in variable.name for variable in v1.global_variables())


def test_slices_in_several_passes_have_to_be_dense():
    def build(**options):
        with tf.Graph().as_default(), v1.Session() as session:
            table = v1.get_variable("table", initializer=np.zeros((3, 2), np.float32))
            loss = tf.reduce_sum(tf.gather(table, [0, 1]))
            optimizer = hvd.DistributedOptimizer(
                v1.train.GradientDescentOptimizer(1.0), backward_passes_per_step=2, **options
            )
            train = optimizer.minimize(loss)
            session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
            for _ in range(2):
                session.run(train)
            return session.run(table)

    with pytest.raises(ValueError, match="IndexedSlices are not supported when `backward_passes"):
        build()
    np.testing.assert_allclose(build(sparse_as_dense=True), [[-2, -2], [-2, -2], [0, 0]])


def test_the_classic_script_with_a_monitored_session(tmp_path):
    with tf.Graph().as_default():
        image = v1.placeholder(tf.float32, [None, 4])
        w = v1.get_variable("w", initializer=np.full((4, 2), hvd.rank() + 1.0, np.float32))
        loss = tf.reduce_mean(tf.square(tf.matmul(image, w)))
        step = v1.train.get_or_create_global_step()
        optimizer = hvd.DistributedOptimizer(v1.train.AdagradOptimizer(0.1))
        train = optimizer.minimize(loss, global_step=step)
        hooks = [hvd.BroadcastGlobalVariablesHook(0), v1.train.StopAtStepHook(last_step=5)]
        folder = str(tmp_path) if hvd.rank() == 0 else None
        values = np.random.default_rng(hvd.rank()).normal(size=(8, 4)).astype(np.float32)
        with v1.train.MonitoredTrainingSession(checkpoint_dir=folder, hooks=hooks) as session:
            first = session.run(w)
            while not session.should_stop():
                _, last = session.run([train, w], {image: values})
    np.testing.assert_array_equal(first, np.ones((4, 2)))
    every = hvd.allgather_object(last)
    for other in every:
        np.testing.assert_array_equal(other, every[0])


def test_passes_and_arguments_that_are_refused():
    inner = v1.train.GradientDescentOptimizer(0.1)
    with pytest.raises(ValueError, match="not yet supported for _LegacyOptimizer with eager"):
        hvd.DistributedOptimizer(inner, backward_passes_per_step=2)
    with pytest.raises(ValueError, match="backward_passes_per_step must be > 0"):
        hvd.DistributedOptimizer(inner, backward_passes_per_step=0)
    with pytest.raises(ValueError, match="not supported with op != Average"):
        hvd.DistributedOptimizer(inner, gradient_predivide_factor=2.0, op=hvd.Sum)
    with pytest.raises(ValueError, match="average_aggregated_gradients == True"):
        hvd.DistributedOptimizer(inner, op=hvd.Adasum, average_aggregated_gradients=True)
    with pytest.raises(NotImplementedError, match="does not support process sets"):
        hvd.DistributedOptimizer(inner, op=hvd.Adasum, process_set=hvd.ProcessSet([0]))
    with pytest.raises(ValueError, match="not supported yet with Keras"):
        hvd.DistributedOptimizer(object(), op=hvd.Adasum)


def test_it_delegates_names_slots_and_variables():
    optimizer = hvd.DistributedOptimizer(v1.train.MomentumOptimizer(0.1, 0.9))
    assert optimizer.get_name() == "DistributedMomentumOptimizer"
    w = tf.Variable([1.0])
    optimizer.minimize(lambda: tf.reduce_sum(w), var_list=[w])
    assert optimizer.get_slot_names() == ["momentum"]
    assert optimizer.get_slot(w, "momentum") is optimizer.variables()[0]


def adasum(vectors):
    """The published rule for a power of two of vectors."""
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [
            a * (1 - a @ b / (2 * (a @ a))) + b * (1 - a @ b / (2 * (b @ b))) for a, b in pairs
        ]
    return vectors[0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("passes", [1, 2])
def test_adasum_combines_moves(mode, passes):
    """Also with variables whose memory a read shares, as TensorFlow 1's own are."""
    directions = [np.array([1.0, 0.5 * r]) for r in range(hvd.size())]
    steps = 2 * passes

    def loss(w):
        return tf.reduce_sum(w * tf.constant(directions[hvd.rank()], tf.float32))

    def make():
        return hvd.DistributedOptimizer(
            v1.train.GradientDescentOptimizer(0.1), op=hvd.Adasum, backward_passes_per_step=passes
        )

    if mode == "session":
        results = []
        for use_resource in (True, False):
            with tf.Graph().as_default(), v1.Session() as session:
                w = v1.get_variable("w", initializer=[1.0, 2.0], use_resource=use_resource)
                train = make().minimize(loss(w))
                session.run(v1.global_variables_initializer())
                for _ in range(steps):
                    session.run(train)
                results.append(session.run(w))
    else:
        w, optimizer = tf.Variable([1.0, 2.0]), make()

        def step():
            optimizer.minimize(lambda: loss(w), var_list=[w])

        called = tf.function(step) if mode == "function" else step
        for _ in range(steps):
            called()
        results = [w.numpy()]
    for result in results:
        every = hvd.allgather_object(np.array(result))
        for other in every:
            np.testing.assert_array_equal(other, every[0])
        if hvd.size() in (1, 2, 4):
            move = adasum([-0.1 * passes * d for d in directions])
            np.testing.assert_allclose(result, [1.0, 2.0] + 2 * move, rtol=1e-5)


def test_the_keras_helper_sums_up_eagerly_and_in_functions():
    from horovod.tensorflow.gradient_aggregation_eager import LocalGradientAggregationHelperEager

    class Counts:
        iterations = tf.Variable(0)

    for compute in (lambda f: f, tf.function):
        a, b, c = tf.Variable([1.0, 1.0]), tf.Variable(1.0), tf.Variable(1.0)
        helper = LocalGradientAggregationHelperEager(
            2, lambda grads, vars: [hvd.allreduce(g, op=hvd.Sum) for g in grads], True, False
        )
        helper.register_local_var(c)
        applied = tf.Variable(0)

        @compute
        def step(x, helper=helper, vars=(a, b, c), applied=applied):
            grads = [tf.fill([2], x), None, x]
            results = helper.compute_gradients(grads, vars)
            helper.apply_gradients(lambda: applied.assign_add(1), Counts)
            return [r for r in results if r is not None]

        mine = hvd.rank() + 1.0
        total = sum(r + 1.0 for r in range(hvd.size()))
        for cycle in range(2):
            first = step(tf.constant(mine))
            np.testing.assert_allclose(first[0], np.full(2, mine))
            assert applied.numpy() == cycle
            second = step(tf.constant(2 * mine))
            np.testing.assert_allclose(second[0], np.full(2, 3 * total))
            np.testing.assert_allclose(second[1], 3 * mine / hvd.size(), rtol=1e-6)
            assert applied.numpy() == cycle + 1
        step(tf.constant(mine))
        helper.reset()
        np.testing.assert_allclose(step(tf.constant(mine))[0], np.full(2, mine))
    assert Counts.iterations.numpy() == 8
