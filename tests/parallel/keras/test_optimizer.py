"""`DistributedOptimizer` in `fit`: training on parts of each batch is training on all of it."""

import keras
import numpy as np
import pytest
from keras_support import (
    BACKEND,
    FIRST,
    GLOBAL_BATCH,
    RANK,
    SIZE,
    apply,
    assert_close,
    data,
    fit,
    mine,
    model,
    same_on_all_ranks,
    weights,
)

import horovod._keras as shared
import horovod.keras as hvd
import horovod.numpy as arrays

OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.05),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "Adam": lambda: keras.optimizers.Adam(0.01),
    "AdamW": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.01),
    "clipnorm": lambda: keras.optimizers.SGD(0.05, clipnorm=0.1),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.05, global_clipnorm=0.1),
    "clipvalue": lambda: keras.optimizers.SGD(0.05, clipvalue=0.01),
    "ema": lambda: keras.optimizers.SGD(0.05, use_ema=True, ema_overwrite_frequency=2),
    "accumulation": lambda: keras.optimizers.SGD(0.05, gradient_accumulation_steps=2),
    "schedule": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5)
    ),
}

# Compiling takes long, and what is reduced is the same; the rest is shown on PyTorch.
SHOWN = OPTIMIZERS if BACKEND == "torch" else ["Adam", "global_clipnorm", "ema", "accumulation"]


def rest(*rows):
    """Rows that the first tier runs on PyTorch alone: they test `horovod._keras`, which all backends share.

    Each backend divides by the passes itself: rows with SGD and passes are no such rows.
    Adam does not see a factor.
    """
    thorough = pytest.mark.thorough(also="tests/test_parallel.py::test_on_every_rank")
    return [pytest.param(row, marks=() if BACKEND == "torch" else thorough) for row in rows]


def create(optimizer, **options):
    """With the arguments that `hvd.DistributedOptimizer` does not have."""
    given = {"compression": hvd.Compression.none, "sparse_as_dense": False}
    given |= {"gradient_predivide_factor": 1.0, "name": None, **options}
    return shared.create_distributed_optimizer(
        keras, optimizer, device_dense="", device_sparse="", **given
    )


@pytest.mark.parametrize("kind", SHOWN)
def test_the_same_training_as_one_process_with_all_data(kind):
    alone = model()
    want = fit(alone, OPTIMIZERS[kind](), part=False)
    together = model()
    got = fit(
        together,
        hvd.DistributedOptimizer(OPTIMIZERS[kind]()),
        callbacks=[hvd.callbacks.MetricAverageCallback()],
    )
    # Adaptive rates divide by gradients near zero, whose last bits depend on the order of addition.
    assert_close(weights(together), weights(alone), 2e-4)
    np.testing.assert_allclose(got.history["loss"], want.history["loss"], rtol=2e-4)
    assert same_on_all_ranks(weights(together))


@pytest.mark.parametrize(
    "options",
    [
        {"op": hvd.Sum},
        {"gradient_predivide_factor": 2.0},
        {"groups": 1},
        {"sparse_as_dense": True},
        *rest({"groups": 3}, {"num_groups": 2}, {"name": "mine"}),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Parameter `num_groups`")
def test_options(options):
    alone, together = model(), model()
    rate = 0.05 / SIZE if "op" in options else 0.05
    fit(alone, keras.optimizers.SGD(0.05), part=False)
    fit(together, hvd.DistributedOptimizer(keras.optimizers.SGD(rate), **options))
    assert_close(weights(together), weights(alone))


class Own(keras.optimizers.SGD):
    """Of a script: other arguments than its base has, no configuration for them, and something held."""

    def __init__(self, rate_of, *, factor=1.0):
        super().__init__(rate_of(), momentum=0.9)
        self.factor = factor

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient * self.factor, variable, learning_rate)


class Falling(keras.optimizers.schedules.LearningRateSchedule):
    """Of a script: without get_config."""

    def __init__(self, *, start):
        self.start = start

    def __call__(self, step):
        return self.start / (1.0 + keras.ops.cast(step, "float32"))


OWN = {
    "class": lambda: Own(lambda: 0.05, factor=0.5),
    "schedule": lambda: keras.optimizers.SGD(Falling(start=0.1), momentum=0.9),
    "both": lambda: Own(lambda: Falling(start=0.1), factor=0.5),
}


@pytest.mark.parametrize("kind", OWN if BACKEND == "torch" else ["both"])
def test_classes_and_schedules_of_the_script(kind):
    alone, together = model(), model()
    fit(alone, OWN[kind](), part=False)
    plain = OWN[kind]()
    optimizer = hvd.DistributedOptimizer(plain)
    assert isinstance(optimizer, type(plain))
    fit(together, optimizer)
    assert_close(weights(together), weights(alone), 2e-4)
    assert int(keras.ops.convert_to_numpy(optimizer.iterations)) == 12
    with pytest.raises(ValueError, match="was wrapped before"):
        hvd.DistributedOptimizer(plain)


def test_a_class_of_the_script_keeps_its_steps_with_several_passes(recwarn):
    alone, together = model(), model()
    first, plain = OWN["class"](), OWN["class"]()
    for its, optimizer in ((alone, first), (together, plain)):
        optimizer.build(its.trainable_variables)
        apply(optimizer, [keras.ops.ones(v.shape) for v in its.trainable_variables], its)
    optimizer = create(plain, backward_passes_per_step=2)
    for factor in (1.0, 3.0):
        grads = [keras.ops.ones(v.shape) * factor for v in together.trainable_variables]
        apply(optimizer, grads, together)
    apply(first, [keras.ops.ones(v.shape) * 4.0 for v in alone.trainable_variables], alone)
    assert_close(weights(together), weights(alone))
    assert int(keras.ops.convert_to_numpy(optimizer.iterations)) == 2
    assert not [w for w in recwarn if "made steps already" in str(w.message)]


def test_operations_in_a_step_of_training():
    """The loss is what the ranks have together; on TensorFlow and JAX it is computed in a compiled step."""

    def loss(y, out):
        own = keras.ops.mean(y)
        parts = [
            hvd.allreduce(own, name="step.allreduce"),
            hvd.allreduce(own, name="step.sum", op=hvd.Sum, compression=hvd.Compression.fp16)
            / SIZE,
            keras.ops.mean(hvd.allgather(keras.ops.reshape(own, (1,)), name="step.allgather")),
            hvd.broadcast(own, 0, name="step.broadcast"),
            keras.ops.mean(hvd.reducescatter(keras.ops.ones((SIZE, 2)) * own, name="step.scatter")),
        ]
        return keras.ops.mean(out) * 0.0 + keras.ops.stack(parts)

    its = model()
    its.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), loss=loss)
    x, y = data(1)
    x, y = mine(x), mine(y)
    got = its.fit(x, y, batch_size=len(x), verbose=0).history["loss"][0]
    own = arrays.allgather_object(float(y.mean()))
    want = (4 * np.mean(own) + own[0]) / 5
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)


def test_tensors_of_a_model_that_is_being_built_are_refused():
    with pytest.raises(
        TypeError, match=r"symbolic tensor of a Keras model .* Call the function in train_step"
    ):
        hvd.allreduce(keras.Input((3,)))


def test_groups_of_variables():
    alone, together = model(), model()
    kernels = [layer.kernel for layer in together.layers]
    fit(alone, keras.optimizers.SGD(0.05), part=False)
    fit(together, hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), groups=[kernels]))
    assert_close(weights(together), weights(alone))


def test_compression_sends_float16_and_gives_float32():
    alone, together = model(), model()
    fit(alone, keras.optimizers.SGD(0.05), part=False)
    compression = hvd.Compression.fp16
    fit(together, hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), compression=compression))
    assert_close(weights(together), weights(alone), 5e-3)
    assert all(w.dtype == np.float32 for w in weights(together))
    assert same_on_all_ranks(weights(together))


@pytest.mark.parametrize("average", [False, True])
def test_several_passes_are_one_step(average):
    """Two passes of a part each are a step on both parts; the last pass of an odd number makes none."""
    alone, together = model(), model()
    x, y = data(7)
    alone.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse")
    alone.fit(x[: 6 * GLOBAL_BATCH], y[: 6 * GLOBAL_BATCH], batch_size=2 * GLOBAL_BATCH,
              shuffle=False, verbose=0)  # fmt: skip
    # Without the average gradients are twice as large, which Adam does not see.
    optimizer = create(
        keras.optimizers.Adam(0.01, epsilon=1e-12),
        backward_passes_per_step=2,
        average_aggregated_gradients=average,
    )
    together.compile(optimizer=optimizer, loss="mse")
    together.fit(mine(x), mine(y), batch_size=GLOBAL_BATCH // SIZE, shuffle=False, verbose=0)
    assert_close(weights(together), weights(alone), 1e-3)
    assert int(keras.ops.convert_to_numpy(optimizer.iterations)) == 3
    assert same_on_all_ranks(weights(together))


def words(batches=6):
    rng = np.random.RandomState(5)
    ids = rng.randint(0, 10, (batches * GLOBAL_BATCH, 4)).astype("int32")
    return ids, rng.randn(len(ids), 3).astype("float32")


class DenseEmbedding(keras.layers.Embedding):
    """With a dense gradient on every backend."""

    def call(self, inputs):
        return keras.ops.matmul(keras.ops.one_hot(inputs, self.input_dim), self.embeddings)


def reader(kind=keras.layers.Embedding):
    """A model whose first gradient is sparse on TensorFlow: rows of an embedding, most of them several times."""
    keras.utils.set_random_seed(3)
    embedding = kind(10, 3)
    return keras.Sequential(
        [keras.Input((4,), dtype="int32"), embedding, keras.layers.Flatten(), keras.layers.Dense(3)]
    )


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("sparse_as_dense", [False, True])
@pytest.mark.parametrize("kind", ["SGD", *rest("Adam")])
def test_embeddings(kind, sparse_as_dense, passes):
    # Keras 3's Adam on TensorFlow squares rows that are there several times one by one, which is no sum's square.
    alone = reader(DenseEmbedding if sparse_as_dense else keras.layers.Embedding)
    together = reader()
    x, y = words()
    alone.compile(optimizer=OPTIMIZERS[kind](), loss="mse")
    alone.fit(x, y, batch_size=passes * GLOBAL_BATCH, epochs=2, shuffle=False, verbose=0)
    optimizer = create(
        OPTIMIZERS[kind](),
        sparse_as_dense=sparse_as_dense,
        backward_passes_per_step=passes,
        average_aggregated_gradients=True,
    )
    together.compile(optimizer=optimizer, loss="mse")
    part = {"batch_size": GLOBAL_BATCH // SIZE, "epochs": 2, "shuffle": False, "verbose": 0}
    if BACKEND == "tensorflow" and passes > 1 and not sparse_as_dense:
        with pytest.raises(ValueError, match="`sparse_as_dense` is False"):
            together.fit(mine(x), mine(y), **part)
        return
    together.fit(mine(x), mine(y), **part)
    assert_close(weights(together), weights(alone), 2e-4)
    assert same_on_all_ranks(weights(together))


def test_local_layers_stay_local():
    its = model()
    first = its.layers[0]
    optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.05), local_layers=[first])
    fit(its, optimizer)
    everyone = arrays.allgather_object([w.tobytes() for w in weights(its)])
    if SIZE > 1:
        assert everyone[0][0] != everyone[-1][0]
    # The others had the same gradients on all ranks.
    assert all(ranks[2:] == everyone[0][2:] for ranks in everyone)


@pytest.mark.parametrize("scale", [True, False])
def test_scale_of_local_gradients(scale):
    its = model()
    optimizer = hvd.PartialDistributedOptimizer(
        keras.optimizers.SGD(1.0), local_layers=its.layers[0], scale_local_gradients=scale
    )
    before = weights(its)
    optimizer.build(its.trainable_variables)
    ones = [keras.ops.ones(v.shape) for v in its.trainable_variables]
    optimizer.apply(ones, its.trainable_variables)
    moved = [b - a for a, b in zip(weights(its), before, strict=True)]
    np.testing.assert_allclose(moved[0], 1.0 / SIZE if scale else 1.0, rtol=1e-5)
    np.testing.assert_allclose(moved[2], 1.0, rtol=1e-5)


def step_of_ranks(optimizer):
    """How far weights move by gradients that are the ranks' numbers."""
    its = model()
    optimizer.build(its.trainable_variables)
    grads = [keras.ops.full(v.shape, float(RANK)) for v in its.trainable_variables]
    before = weights(its)
    optimizer.apply(grads, its.trainable_variables)
    return before[0] - weights(its)[0]


def test_all_ranks_or_some():
    optimizer = create(keras.optimizers.SGD(1.0), process_set=hvd.global_process_set)
    assert optimizer.process_set is hvd.global_process_set
    np.testing.assert_allclose(step_of_ranks(optimizer), (SIZE - 1) / 2, rtol=1e-5)
    if SIZE > 1:
        alone = create(keras.optimizers.SGD(1.0), process_set=FIRST)
        np.testing.assert_allclose(step_of_ranks(alone), RANK, rtol=1e-5)


def test_missing_gradients_stay_missing():
    its = model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    variables = its.trainable_variables
    grads = [keras.ops.ones(v.shape) for v in variables]
    grads[1] = None
    before = weights(its)
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        optimizer.apply_gradients(zip(grads, variables, strict=True))
    moved = [b - a for a, b in zip(weights(its), before, strict=True)]
    np.testing.assert_allclose(moved[0], 1.0, rtol=1e-5)
    np.testing.assert_array_equal(moved[1], 0.0)


class TestLossScaling:
    def test_a_step_is_skipped_on_all_ranks_or_on_none(self):
        its = model()
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=4.0)
        )
        assert isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        variables = its.trainable_variables
        optimizer.build(variables)
        grads = [keras.ops.full(v.shape, 4.0) for v in variables]
        before = weights(its)
        bad = list(grads)
        if RANK == SIZE - 1:
            bad[2] = grads[2] * float("inf")
        apply(optimizer, bad, its)
        assert_close(weights(its), before, 0)
        apply(optimizer, grads, its)
        # The scale is half by now: four divided by two.
        assert_close(weights(its), [w - 2.0 for w in before])
        assert same_on_all_ranks(weights(its))

    def test_an_overflow_in_a_local_layer_counts_for_all(self):
        its = model()
        optimizer = hvd.PartialDistributedOptimizer(
            keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0)),
            local_layers=its.layers[0],
        )
        variables = its.trainable_variables
        optimizer.build(variables)
        grads = [keras.ops.ones(v.shape) for v in variables]
        if RANK == 0:
            grads[0] = grads[0] * float("nan")
        before = weights(its)
        apply(optimizer, grads, its)
        assert_close(weights(its), before, 0)

    def test_compile_wraps_it_for_mixed_precision(self):
        keras.mixed_precision.set_global_policy("mixed_float16")
        its = model()
        history = fit(its, hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), epochs=4)
        wrapped = its.optimizer
        assert isinstance(wrapped, keras.optimizers.LossScaleOptimizer)
        assert isinstance(wrapped.inner_optimizer, keras.optimizers.SGD)
        # It is the outer one that reduces, and looks at what it has reduced.
        assert not wrapped._hvd_is_inner
        assert wrapped.inner_optimizer._hvd_is_inner
        assert same_on_all_ranks(weights(its))
        assert history.history["loss"][-1] < history.history["loss"][0]

    def test_with_several_passes(self):
        keras.mixed_precision.set_global_policy("mixed_float16")
        its = model()
        fit(its, create(keras.optimizers.SGD(0.05), backward_passes_per_step=2))
        # Steps in which something overflows are not counted.
        assert 1 < int(keras.ops.convert_to_numpy(its.optimizer.iterations)) <= 6
        assert same_on_all_ranks(weights(its))


class TestAttributes:
    def test_the_class_is_the_wrapped_ones(self):
        plain = keras.optimizers.Adam(0.01)
        optimizer = hvd.DistributedOptimizer(plain)
        assert type(optimizer).__name__ == "Adam"
        assert isinstance(optimizer, type(plain))
        assert isinstance(optimizer, keras.optimizers.Adam)
        assert type(optimizer).__module__ == "keras.optimizers"
        assert optimizer.get_config() == plain.get_config()

    def test_variables_may_be_called(self):
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
        assert optimizer.variables() == list(optimizer.variables)
        if BACKEND == "tensorflow":
            import horovod.tensorflow

            optimizer.iterations.assign(RANK + 5)
            horovod.tensorflow.broadcast_variables(optimizer.variables(), root_rank=0)
            assert int(optimizer.iterations) == 5

    def test_lr_is_the_learning_rate(self):
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
        optimizer.lr = 0.5
        assert float(keras.ops.convert_to_numpy(optimizer.learning_rate)) == 0.5
        assert float(keras.ops.convert_to_numpy(optimizer.lr)) == 0.5

    def test_variables_without_weight_decay_stay_so(self):
        its = model()
        plain = keras.optimizers.SGD(1.0, weight_decay=0.5)
        plain.exclude_from_weight_decay(var_list=[its.layers[0].kernel])
        optimizer = hvd.DistributedOptimizer(plain)
        before = weights(its)
        zeros = [keras.ops.zeros(v.shape) for v in its.trainable_variables]
        optimizer.build(its.trainable_variables)
        optimizer.apply(zeros, its.trainable_variables)
        np.testing.assert_array_equal(weights(its)[0], before[0])
        np.testing.assert_allclose(weights(its)[2], before[2] / 2, rtol=1e-6)


class TestErrors:
    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"op": hvd.Adasum}, "op currently only supports Average and Sum"),
            ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "op != Average"),
            ({"groups": 0}, "groups should be a non-negative integer or a list"),
            ({"groups": "all"}, "groups should be a non-negative integer or a list"),
            ({"groups": [["kernel"]]}, "groups should be a non-negative integer or a list"),
        ],
    )
    def test_options_that_cannot_be(self, options, text):
        with pytest.raises(ValueError, match=text):
            hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), **options)

    def test_passes(self):
        with pytest.raises(ValueError, match="backward_passes_per_step must be > 0"):
            create(keras.optimizers.SGD(0.1), backward_passes_per_step=0)
        with pytest.raises(ValueError, match="gradient_accumulation_steps"):
            create(
                keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), backward_passes_per_step=2
            )

    def test_what_is_no_optimizer(self):
        with pytest.raises(TypeError, match="Expected an optimizer of Keras"):
            hvd.DistributedOptimizer("sgd")

    def test_twice(self):
        with pytest.raises(ValueError, match="distributed already"):
            hvd.DistributedOptimizer(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))

    def test_local_layers(self):
        with pytest.raises(ValueError, match=r"All local layers must be of tf\.keras\.layers"):
            hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=[3])

    def test_one_that_has_stepped_says_that_it_begins_anew(self):
        its = model()
        plain = keras.optimizers.SGD(0.1)
        fit(its, plain, part=False, epochs=1)
        with pytest.warns(UserWarning, match="begins anew"):
            hvd.DistributedOptimizer(plain)

    @pytest.mark.skipif(SIZE == 1, reason="nobody to disagree with")
    @pytest.mark.skipif(BACKEND != "torch", reason="the others' shapes are checked in a graph")
    def test_gradients_that_differ_between_ranks(self):
        its = model(wide=6 + RANK)
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
        grads = [keras.ops.ones(v.shape) for v in its.trainable_variables]
        optimizer.build(its.trainable_variables)
        with pytest.raises(RuntimeError, match="Mismatched"):
            optimizer.apply(grads, its.trainable_variables)


@pytest.mark.skipif(BACKEND == "torch", reason="Keras on PyTorch has none")
def test_steps_per_execution():
    alone, together = model(), model()
    x, y = data()
    alone.compile(optimizer=keras.optimizers.SGD(0.05), loss="mse")
    alone.fit(x, y, batch_size=GLOBAL_BATCH, shuffle=False, verbose=0)
    together.compile(
        optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)),
        loss="mse",
        steps_per_execution=3,
    )
    together.fit(mine(x), mine(y), batch_size=GLOBAL_BATCH // SIZE, shuffle=False, verbose=0)
    assert_close(weights(together), weights(alone))


@pytest.mark.skipif(BACKEND != "tensorflow", reason="on JAX all is compiled, on PyTorch nothing")
@pytest.mark.parametrize("passes", [1, 2])
def test_compiled_steps(passes):
    alone, together = model(), model()
    plain = keras.optimizers.SGD(0.05, gradient_accumulation_steps=2 if passes == 2 else None)
    fit(alone, plain, part=False)
    optimizer = create(
        keras.optimizers.SGD(0.05),
        backward_passes_per_step=passes,
        average_aggregated_gradients=True,
    )
    fit(together, optimizer, jit_compile=True)
    assert together.jit_compile
    assert_close(weights(together), weights(alone))
