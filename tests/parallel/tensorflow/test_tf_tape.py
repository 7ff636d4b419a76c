"""`DistributedGradientTape`: gradients are those of all ranks, however they are grouped, scaled, or left local."""

import numpy as np
import pytest
import tensorflow as tf
from tf_modes import MODES

import horovod.tensorflow as hvd
from horovod.tensorflow import _gradient_reduction
from horovod.tensorflow._variables import tf_variable


@pytest.fixture(params=[True, False], ids=["full host", "spare cores"])
def cores(request, monkeypatch):
    """Whether the ranks fill their host: in graphs that decides whether gradients go together."""
    monkeypatch.setattr(_gradient_reduction, "fills_its_host", lambda: request.param)
    return request.param


def variables():
    return [
        tf.Variable([1.0, 2.0], name="a"),
        tf.Variable([[3.0], [4.0]], name="b"),
        tf.Variable(5.0, name="c"),
        tf.Variable([6.0, 7.0], name="d", dtype=tf.float64),
    ]


def loss(vars, rank):
    parts = [tf.reduce_sum(tf.cast(v * v, tf.float32)) * (i + 1) for i, v in enumerate(vars)]
    return tf.add_n(parts) * (rank + 1.0)


def gradients(
    mode, make_tape, given=None, read=lambda tape, value, vars: tape.gradient(value, vars)
):
    """The gradients that a distributed tape gives, as arrays."""

    def compute(vars):
        with tf.GradientTape() as tape:
            value = loss(vars, hvd.rank())
        return read(make_tape(tape, vars), value, vars)

    if mode == "session":
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            results = compute(variables())
            session.run(tf.compat.v1.global_variables_initializer())
            return session.run(results)
    vars = variables()
    called = tf.function(compute) if mode == "function" else compute
    return [result.numpy() for result in called(vars)]


def want(factor):
    with tf.GradientTape() as tape:
        vars = variables()
        value = loss(vars, 0)
    # NumPy 1 makes doubles of scalars.
    return [
        np.asarray(grad.numpy() * factor, grad.numpy().dtype) for grad in tape.gradient(value, vars)
    ]


def average_rank():
    return np.mean([r + 1.0 for r in range(hvd.size())])


OPTIONS = [
    {},
    {"op": hvd.Sum},
    {"gradient_predivide_factor": 4.0},
    {"compression": hvd.Compression.fp16},
    {"groups": 2},
    {"groups": 7},
    {"groups": [[0, 2], [1]]},
]


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients_are_those_of_all_ranks(mode, options):
    def make(tape, vars):
        given = dict(options)
        if isinstance(given.get("groups"), list):
            given["groups"] = [[vars[i] for i in group] for group in given["groups"]]
        return hvd.DistributedGradientTape(tape, **given)

    factor = average_rank() * (hvd.size() if options.get("op") == hvd.Sum else 1)
    for got, expected in zip(gradients(mode, make), want(factor), strict=True):
        assert got.dtype == expected.dtype
        np.testing.assert_allclose(got, expected, rtol=1e-3 if "compression" in options else 1e-6)


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize("mode", MODES)
def test_generic_names_pair_gradients_by_position(mode):
    read = lambda tape, value, vars: tape.gradient(value, vars, use_generic_names=True)  # noqa: E731
    got = gradients(mode, lambda tape, vars: hvd.DistributedGradientTape(tape), read=read)
    for one, expected in zip(got, want(average_rank()), strict=True):
        np.testing.assert_allclose(one, expected, rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scaled", [True, False])
def test_local_sources_stay_local(mode, scaled):
    def make(tape, vars):
        tape = hvd.DistributedGradientTape(tape, scale_local_gradients=scaled)
        tape.register_local_source(vars[1])
        return tape

    got = gradients(mode, make)
    expected = want(average_rank())
    expected[1] = want((hvd.rank() + 1.0) / (hvd.size() if scaled else 1))[1]
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_local_and_global_gradients_come_apart():
    vars = variables()
    with tf.GradientTape() as tape:
        value = loss(vars, hvd.rank())
    tape = hvd.DistributedGradientTape(tape)
    tape.register_local_source(vars[0])
    local, shared = tape.get_local_and_global_gradients(value, vars)
    assert [source is vars[0] for source, _ in local] == [True]
    assert [source.name for source, _ in shared] == [v.name for v in vars[1:]]


def test_partial_tape_leaves_layers_local():
    import keras

    layer, other = keras.layers.Dense(2), keras.layers.Dense(1)
    x = tf.ones((1, 3)) * (hvd.rank() + 1.0)
    other(layer(x))
    weights = layer.trainable_weights + other.trainable_weights
    hvd.broadcast_variables(weights, 0)
    with tf.GradientTape(persistent=True) as tape:
        value = tf.reduce_sum(other(layer(x)))
    plain = tape.gradient(value, [tf_variable(w) for w in weights])
    tape = hvd.PartialDistributedGradientTape(tape, local_layers=layer)
    got = tape.gradient(value, weights)
    for i in range(2):
        np.testing.assert_allclose(got[i], plain[i] / hvd.size(), rtol=1e-6)
    for i in range(2, 4):
        np.testing.assert_allclose(got[i], hvd.allreduce(plain[i]), rtol=1e-6)
    with pytest.raises(ValueError, match=r"must be of tf\.keras\.layers\.Layer type"):
        hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=[layer, 3])


def test_it_records_itself_as_a_context_manager():
    w = tf.Variable(2.0)
    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        value = w * w * (hvd.rank() + 1.0)
    assert isinstance(tape, tf.GradientTape)
    assert type(tape).__name__ == "GradientTape"
    assert tape.gradient(value, w).numpy() == pytest.approx(4.0 * average_rank())
    with pytest.raises(RuntimeError, match="non-persistent"):
        tape.gradient(value, w)


def test_a_persistent_tape_and_a_subclass_keep_their_nature():
    class Marked(tf.GradientTape):
        mark = "mine"

    w = tf.Variable(2.0)
    given = Marked(persistent=True)
    given.note = 7
    with given:
        value = w * w * (hvd.rank() + 1.0)
    tape = hvd.DistributedGradientTape(given)
    assert (type(tape).__name__, tape.mark, tape.note) == ("Marked", "mine", 7)
    for _ in range(2):
        assert tape.gradient(value, w).numpy() == pytest.approx(4.0 * average_rank())


def test_structures_none_and_unconnected_gradients():
    a, b = tf.Variable(1.0), tf.Variable(1.0)
    with tf.GradientTape() as tape:
        value = a * (hvd.rank() + 1.0)
    got = hvd.DistributedGradientTape(tape).gradient(value, {"a": a, "b": b})
    assert got["b"] is None
    assert got["a"].numpy() == pytest.approx(average_rank())
    with tf.GradientTape() as tape:
        value = a * (hvd.rank() + 1.0)
    tape = hvd.DistributedGradientTape(tape)
    got = tape.gradient(value, (a, b), unconnected_gradients=tf.UnconnectedGradients.ZERO)
    assert isinstance(got, list)
    assert got[1].numpy() == 0.0


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("as_dense", [False, True])
def test_slices_of_embeddings(mode, as_dense):
    def compute(table):
        rows = tf.constant([0, 1 + hvd.rank()])
        with tf.GradientTape() as tape:
            value = tf.reduce_sum(tf.gather(table, rows))
        tape = hvd.DistributedGradientTape(tape, sparse_as_dense=as_dense)
        (grad,) = tape.gradient(value, [table])
        assert isinstance(grad, tf.IndexedSlices) != as_dense
        return tf.convert_to_tensor(grad)

    shape = (hvd.size() + 1, 2)
    if mode == "session":
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            result = compute(tf.Variable(np.zeros(shape, np.float32)))
            session.run(tf.compat.v1.global_variables_initializer())
            got = session.run(result)
    else:
        table = tf.Variable(tf.zeros(shape))
        got = (tf.function(compute) if mode == "function" else compute)(table).numpy()
    expected = np.full(shape, 1.0 / hvd.size())
    expected[0] = 1.0
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def reductions(function):
    """The types of the reductions in a function's graph."""
    operations = function.get_concrete_function().graph.get_operations()
    return sorted(o.type for o in operations if o.type.startswith("Horovod"))


@pytest.mark.parametrize("groups", [None, 3])
def test_gradients_go_together_where_no_core_is_left_over(cores, groups):
    if hvd.size() == 1:
        pytest.skip("nothing is reduced")
    vars = variables()

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            value = loss(vars, hvd.rank())
        return hvd.DistributedGradientTape(tape, groups=groups).gradient(value, vars)

    # One of each dtype: the last of the variables has another one.
    together, apart = ["HorovodGroupedAllreduce"] * 2, ["HorovodAllreduce"] * 4
    asked_for = ["HorovodGroupedAllreduce"] * 3
    assert reductions(step) == (asked_for if groups else together if cores else apart)


@pytest.mark.parametrize("missing", range(3))
def test_ranks_that_differ_in_which_gradients_there_are_hear_of_it(monkeypatch, missing):
    if hvd.size() == 1:
        pytest.skip("nobody to differ from")
    monkeypatch.setattr(_gradient_reduction, "fills_its_host", lambda: True)
    vars = [tf.Variable([1.0, 2.0]), tf.Variable([3.0, 4.0]), tf.Variable([5.0, 6.0])]
    used = [v for i, v in enumerate(vars) if hvd.rank() == 0 or i != missing]

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            value = tf.add_n([tf.reduce_sum(v * v) for v in used])
        gradients = hvd.DistributedGradientTape(tape).gradient(value, vars)
        return [gradient for gradient in gradients if gradient is not None]

    with pytest.raises(tf.errors.FailedPreconditionError, match="HorovodGroupedAllreduce_grads_0"):
        step()


def test_a_process_set_leaves_the_others_alone():
    if hvd.size() < 3:
        pytest.skip("needs three ranks")
    hvd.allreduce(tf.zeros(1))
    hvd.shutdown()
    members = hvd.ProcessSet([0, 2])
    hvd.init(process_sets=[members])
    w = tf.Variable(1.0)
    for compute in (lambda f: f, tf.function):

        def step():
            with tf.GradientTape() as tape:
                value = w * (hvd.rank() + 1.0) ** 2
            return hvd.DistributedGradientTape(tape, process_set=members).gradient(value, [w])

        (got,) = compute(step)()
        assert got.numpy() == pytest.approx(5.0 if hvd.rank() != 1 else 4.0)
    hvd.allreduce(tf.zeros(1))
    hvd.shutdown()


def test_what_does_not_go_together_is_refused():
    tape = tf.GradientTape()
    with pytest.raises(ValueError, match="not supported with op != Average"):
        hvd.DistributedGradientTape(tape, op=hvd.Sum, gradient_predivide_factor=2.0)
    for groups in (0, -1, "two", 1.5):
        with pytest.raises(ValueError, match="groups should be a non-negative integer"):
            hvd.DistributedGradientTape(tape, groups=groups)
    with pytest.warns(DeprecationWarning, match="num_groups"):
        hvd.DistributedGradientTape(tape, num_groups=2)


def test_tracing_says_nothing_of_autograph(caplog):
    w = tf.Variable(1.0)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            value = w * w
        return hvd.DistributedGradientTape(tape).gradient(value, [w])

    step()
    assert "AutoGraph" not in caplog.text


@pytest.mark.skipif(
    tf.__version__.startswith("2.13."), reason="it does not export XLA's foreign functions"
)
def test_programs_that_xla_compiles_get_the_same_gradients():
    vars = variables()

    @tf.function(jit_compile=True)
    def step():
        with tf.GradientTape() as tape:
            value = loss(vars, hvd.rank())
        return hvd.DistributedGradientTape(tape).gradient(value, vars)

    for got, expected in zip(step(), want(average_rank()), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6)
    # One call for each dtype: XLA runs calls one after the other.
    program = step.experimental_get_compiler_ir()(stage="hlo")
    assert program.count('custom_call_target="horovod_xla_allreduce"') == (
        2 if hvd.size() > 1 else 0
    )
