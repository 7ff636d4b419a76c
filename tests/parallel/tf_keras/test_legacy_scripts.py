"""Calls of scripts written for TensorFlow 2 and Keras 2, in their order, under `TF_USE_LEGACY_KERAS=1`.

Each test is one kind of script in docs/keras.md ("Older scripts"), with other data and models.
"""

import timeit

import numpy as np
import tensorflow as tf

import horovod.numpy as arrays
import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras

hvd.init()
SIZE, RANK = hvd.size(), hvd.rank()


def digits(batch=8):
    rng = np.random.RandomState(RANK)
    images = rng.rand(64, 8, 8, 1).astype("float32")
    labels = rng.randint(0, 10, 64).astype("int64")
    return tf.data.Dataset.from_tensor_slices((images, labels)).repeat().shuffle(64).batch(batch)


def model():
    return tf.keras.Sequential(
        [
            tf.keras.layers.Conv2D(4, [3, 3], activation="relu", input_shape=(8, 8, 1)),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dropout(0.25),
            tf.keras.layers.Dense(10, activation="softmax"),
        ]
    )


def same_on_all_ranks(variables):
    everyone = arrays.allgather_object([np.asarray(v).tobytes() for v in variables])
    return all(its == everyone[0] for its in everyone)


def test_a_loop_with_a_tape(tmp_path):
    mnist = model()
    loss = tf.losses.SparseCategoricalCrossentropy()
    opt = tf.optimizers.Adam(0.001 * hvd.size())
    checkpoint = tf.train.Checkpoint(model=mnist, optimizer=opt)

    @tf.function
    def training_step(images, labels, first_batch):
        with tf.GradientTape() as tape:
            loss_value = loss(labels, mnist(images, training=True))
        tape = hvd.DistributedGradientTape(tape)
        grads = tape.gradient(loss_value, mnist.trainable_variables)
        opt.apply_gradients(zip(grads, mnist.trainable_variables, strict=True))
        if first_batch:
            hvd.broadcast_variables(mnist.variables, root_rank=0)
            hvd.broadcast_variables(opt.variables(), root_rank=0)
        return loss_value

    for batch, (images, labels) in enumerate(digits().take(4)):
        training_step(images, labels, batch == 0)
    if hvd.rank() == 0:
        checkpoint.save(str(tmp_path / "checkpoint"))
    assert same_on_all_ranks(mnist.variables)


def test_fit_with_callbacks(tmp_path):
    mnist = model()
    scaled_lr = 0.001 * hvd.size()
    opt = hvd_keras.DistributedOptimizer(
        tf.optimizers.Adam(scaled_lr), backward_passes_per_step=1, average_aggregated_gradients=True
    )
    mnist.compile(
        loss=tf.losses.SparseCategoricalCrossentropy(),
        optimizer=opt,
        metrics=["accuracy"],
        experimental_run_tf_function=False,
    )
    callbacks = [
        hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd_keras.callbacks.MetricAverageCallback(),
        hvd_keras.callbacks.LearningRateWarmupCallback(
            initial_lr=scaled_lr, warmup_epochs=3, verbose=1
        ),
    ]
    if hvd.rank() == 0:
        callbacks.append(tf.keras.callbacks.ModelCheckpoint(str(tmp_path / "{epoch}.h5")))
    mnist.fit(
        digits(), steps_per_epoch=4 // hvd.size() or 1, callbacks=callbacks, epochs=4, verbose=0
    )
    assert same_on_all_ranks(mnist.weights)
    np.testing.assert_allclose(float(opt.lr), scaled_lr, rtol=1e-5)


def test_a_synthetic_benchmark_with_a_tape_and_one_with_fit():
    make = getattr(tf.keras.applications, "MobileNet")  # noqa: B009 - scripts take the name from an option
    network = make(weights=None, input_shape=(32, 32, 3), alpha=0.25, classes=10)
    opt = tf.optimizers.SGD(0.01)
    data = tf.random.uniform([4, 32, 32, 3])
    target = tf.random.uniform([4, 1], minval=0, maxval=9, dtype=tf.int64)

    @tf.function
    def benchmark_step(first_batch):
        with tf.GradientTape() as tape:
            probs = network(data, training=True)
            loss = tf.losses.SparseCategoricalCrossentropy()(target, probs)
        tape = hvd.DistributedGradientTape(tape, compression=hvd.Compression.fp16)
        gradients = tape.gradient(loss, network.trainable_variables)
        opt.apply_gradients(zip(gradients, network.trainable_variables, strict=True))
        if first_batch:
            hvd.broadcast_variables(network.variables, root_rank=0)
            hvd.broadcast_variables(opt.variables(), root_rank=0)

    with tf.device("/cpu:0"):
        benchmark_step(first_batch=True)
        assert timeit.timeit(lambda: benchmark_step(first_batch=False), number=2) > 0
    assert same_on_all_ranks(network.trainable_variables)

    fitted = make(weights=None, input_shape=(32, 32, 3), alpha=0.25, classes=10)
    distributed = hvd_keras.DistributedOptimizer(
        tf.optimizers.SGD(0.01), compression=hvd_keras.Compression.fp16
    )
    fitted.compile(
        loss=tf.losses.SparseCategoricalCrossentropy(),
        optimizer=distributed,
        experimental_run_tf_function=False,
    )
    dataset = tf.data.Dataset.from_tensor_slices((data, target)).cache().repeat().batch(4)
    callbacks = [hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0)]
    fitted.fit(dataset, epochs=1, steps_per_epoch=2, callbacks=callbacks, verbose=0)
    assert same_on_all_ranks(fitted.trainable_variables)


def test_an_elastic_loop_sets_the_rate():
    mnist = model()
    opt = tf.optimizers.Adam(0.001 * hvd.size())
    loss = tf.losses.SparseCategoricalCrossentropy()

    @tf.function
    def training_step(images, labels):
        with tf.GradientTape() as tape:
            loss_value = loss(labels, mnist(images, training=True))
        tape = hvd.DistributedGradientTape(tape)
        grads = tape.gradient(loss_value, mnist.trainable_variables)
        opt.apply_gradients(zip(grads, mnist.trainable_variables, strict=True))
        return loss_value

    for images, labels in digits().take(1):
        training_step(images, labels)

    @hvd.elastic.run
    def train(state):
        start = state.batch
        for batch, (images, labels) in enumerate(digits().skip(start).take(4 - start)):
            training_step(images, labels)
            state.batch = start + batch + 1
            if state.batch % 2 == 0:
                state.commit()

    def on_state_reset():
        opt.lr.assign(0.001 * hvd.size())

    state = hvd.elastic.TensorFlowKerasState(mnist, opt, batch=0)
    state.register_reset_callbacks([on_state_reset])
    train(state)
    assert state.batch == 4
    assert same_on_all_ranks(mnist.variables)
    state.on_reset()
    np.testing.assert_allclose(float(opt.lr), 0.001 * SIZE, rtol=1e-6)


def test_an_elastic_fit_sets_the_rate_by_the_backend():
    mnist = model()
    opt = hvd_keras.DistributedOptimizer(tf.optimizers.Adam(0.001 * hvd.size()))
    mnist.compile(
        loss=tf.losses.SparseCategoricalCrossentropy(),
        optimizer=opt,
        metrics=["accuracy"],
        experimental_run_tf_function=False,
    )
    mnist.fit(digits(), steps_per_epoch=1, epochs=1, callbacks=None, verbose=0)
    state = hvd_keras.elastic.KerasState(mnist, batch=4, epoch=0)

    def on_state_reset():
        tf.keras.backend.set_value(state.model.optimizer.lr, 0.001 * hvd.size())
        state.model.fit(digits(), steps_per_epoch=1, epochs=1, callbacks=None, verbose=0)

    state.register_reset_callbacks([on_state_reset])
    callbacks = [
        hvd_keras.callbacks.MetricAverageCallback(),
        hvd_keras.elastic.UpdateEpochStateCallback(state),
        hvd_keras.elastic.UpdateBatchStateCallback(state),
        hvd_keras.elastic.CommitStateCallback(state),
    ]

    @hvd_keras.elastic.run
    def train(state):
        steps, epochs = 6, 2 - state.epoch
        state.model.fit(
            digits(), steps_per_epoch=steps, callbacks=callbacks, epochs=epochs, verbose=0
        )

    train(state)
    assert (state.epoch, state.batch) == (2, 0)
    assert same_on_all_ranks(mnist.weights)
    state.on_reset()
    np.testing.assert_allclose(float(mnist.optimizer.lr), 0.001 * SIZE, rtol=1e-6)
