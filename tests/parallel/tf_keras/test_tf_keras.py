"""`horovod.tensorflow.keras` with Keras 2 (`tf_keras`), and both generations in one process."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import horovod.numpy as arrays
import horovod.tensorflow.keras as hvd

hvd.init()
SIZE, RANK = hvd.size(), hvd.rank()
BATCH = 24


@pytest.fixture(scope="session", autouse=True)
def _job():
    yield
    hvd.shutdown()


def data():
    rng = np.random.RandomState(7)
    x = rng.randn(4 * BATCH, 5).astype("float32")
    return x, (x @ rng.randn(5, 3)).astype("float32")


def model(seed=3):
    tf_keras.utils.set_random_seed(seed)
    return tf_keras.Sequential(
        [tf_keras.layers.Dense(6, activation="tanh", input_shape=(5,)), tf_keras.layers.Dense(3)]
    )


def fit(its, optimizer, *, part, callbacks=(), epochs=2):
    its.compile(optimizer=optimizer, loss="mse", experimental_run_tf_function=False)
    x, y = data()
    batch = BATCH
    if part:
        batch = BATCH // SIZE
        x, y = (
            a.reshape(-1, BATCH, a.shape[1])[:, RANK * batch : (RANK + 1) * batch].reshape(
                -1, a.shape[1]
            )
            for a in (x, y)
        )
    return its.fit(
        x,
        y,
        batch_size=batch,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=[*callbacks],
    )


OPTIMIZERS = {
    "new": lambda **options: tf_keras.optimizers.SGD(0.05, momentum=0.9, **options),
    "legacy": lambda **options: tf_keras.optimizers.legacy.SGD(0.05, momentum=0.9, **options),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_same_training_as_one_process_with_all_data(kind):
    assert issubclass(tf_keras.Sequential, tf.keras.Model)
    alone, together = model(), model()
    want = fit(alone, OPTIMIZERS[kind](clipnorm=1.0), part=False)
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS[kind](clipnorm=1.0))
    assert type(optimizer).__name__ == "SGD"
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
    ]
    got = fit(together, optimizer, part=True, callbacks=callbacks)
    for a, b in zip(together.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got.history["loss"], want.history["loss"], rtol=1e-4)


@pytest.mark.parametrize("name", ["compute_gradients", "_compute_gradients"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_gradients_are_computed_under_the_names_of_both_kinds(kind, name):
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS[kind]())
    variable = tf.Variable([1.0, 2.0])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(variable * (RANK + 1.0))
    [(gradient, of)] = getattr(optimizer, name)(loss, [variable], tape=tape)
    assert of is variable
    np.testing.assert_allclose(gradient, [(SIZE + 1) / 2] * 2)


class Falling(tf_keras.optimizers.schedules.LearningRateSchedule):
    """Of a script: without get_config."""

    def __call__(self, step):
        return 0.1 / (1.0 + tf.cast(step, tf.float32))


def own(base):
    """An optimizer of a class of the script, which takes other arguments than its configuration has."""

    class Own(base):
        def __init__(self, rate_of):
            super().__init__(rate_of(), momentum=0.9)

    return Own(Falling)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_classes_and_schedules_of_the_script(kind):
    base = type(OPTIMIZERS[kind]())
    alone, together = model(), model()
    fit(alone, own(base), part=False)
    optimizer = hvd.DistributedOptimizer(own(base))
    fit(together, optimizer, part=True)
    for a, b in zip(together.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert int(optimizer.iterations) == 8


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_several_passes(kind):
    its = model(seed=1)
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS[kind](), backward_passes_per_step=2, average_aggregated_gradients=True
    )
    before = its.get_weights()
    fit(its, optimizer, part=True)
    everyone = arrays.allgather_object([w.tobytes() for w in its.get_weights()])
    assert all(ranks == everyone[0] for ranks in everyone)
    assert not np.array_equal(its.get_weights()[0], before[0])


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("sparse_as_dense", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_embeddings(kind, sparse_as_dense, passes):
    def reader():
        tf_keras.utils.set_random_seed(3)
        embedding = tf_keras.layers.Embedding(10, 3, input_length=4)
        return tf_keras.Sequential([embedding, tf_keras.layers.Flatten(), tf_keras.layers.Dense(3)])

    rng = np.random.RandomState(5)
    x, y = rng.randint(0, 10, (4 * BATCH, 4)), rng.randn(4 * BATCH, 3).astype("float32")
    alone, together = reader(), reader()
    alone.compile(optimizer=OPTIMIZERS[kind](), loss="mse")
    alone.fit(x, y, batch_size=passes * BATCH, epochs=2, shuffle=False, verbose=0)
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS[kind](),
        sparse_as_dense=sparse_as_dense,
        backward_passes_per_step=passes,
        average_aggregated_gradients=True,
    )
    together.compile(optimizer=optimizer, loss="mse")
    part = BATCH // SIZE
    own = [
        a.reshape(-1, BATCH, a.shape[1])[:, RANK * part : (RANK + 1) * part].reshape(-1, a.shape[1])
        for a in (x, y)
    ]
    options = {"batch_size": part, "epochs": 2, "shuffle": False, "verbose": 0}
    if passes > 1 and not sparse_as_dense:
        with pytest.raises(ValueError, match="`sparse_as_dense` is False"):
            together.fit(*own, **options)
        return
    together.fit(*own, **options)
    for a, b in zip(together.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_callbacks_that_set_the_rate(kind):
    its = model()
    warmup = hvd.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=2, verbose=0)
    history = fit(its, hvd.DistributedOptimizer(OPTIMIZERS[kind]()), part=True, callbacks=[warmup])
    np.testing.assert_allclose(history.history["lr"][-1], 0.4, rtol=1e-5)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.filterwarnings("ignore")
def test_saving(kind, tmp_path):
    its = model()
    fit(its, hvd.DistributedOptimizer(OPTIMIZERS[kind]()), part=True)
    path = str(tmp_path / "model.h5")
    its.save(path)
    plain = tf_keras.models.load_model(path)
    assert not hasattr(plain.optimizer, "_hvd")
    loaded = hvd.load_model(path, legacy_opts=kind == "legacy")
    assert hasattr(loaded.optimizer, "_hvd")
    assert int(loaded.optimizer.iterations) == int(its.optimizer.iterations) == 8


def test_loss_scaling():
    inner = tf_keras.optimizers.SGD(0.05)
    optimizer = hvd.DistributedOptimizer(tf_keras.mixed_precision.LossScaleOptimizer(inner))
    its = model()
    fit(its, optimizer, part=True)
    everyone = arrays.allgather_object([w.tobytes() for w in its.get_weights()])
    assert all(ranks == everyone[0] for ranks in everyone)


def test_elastic_state():
    its = model()
    fit(its, hvd.DistributedOptimizer(OPTIMIZERS["new"]()), part=True, epochs=1)
    state = hvd.elastic.KerasState(its, batch=0, epoch=0)
    before = its.get_weights()
    state.commit()
    its.set_weights([w + 1 for w in before])
    state.batch = 5
    state.restore()
    assert state.batch == 0
    for a, b in zip(its.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b)
    callbacks = [
        hvd.elastic.CommitStateCallback(state),
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.UpdateEpochStateCallback(state),
    ]
    state.batch = 2
    fit(its, its.optimizer, part=True, callbacks=callbacks, epochs=2)
    assert (state.epoch, state.batch) == (2, 0)
    assert int(its.optimizer.iterations) == 4 + 2 + 4


def test_both_generations_in_one_process():
    import keras

    assert keras.__version__.startswith("3.")
    three = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    two = hvd.DistributedOptimizer(tf_keras.optimizers.SGD(0.1))
    assert isinstance(three, keras.optimizers.SGD)
    assert isinstance(two, tf_keras.optimizers.SGD)
    its = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])
    its.compile(optimizer=three, loss="mse")
    x, y = data()
    # Callbacks of the one serve the other's models.
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
    ]
    its.fit(x, y, verbose=0, callbacks=callbacks)
    fit(model(), two, part=True)
