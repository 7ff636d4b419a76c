"""`allreduce` and its kin beyond tests/conformance: slices, compression, refusals."""

import numpy as np
import pytest
import tensorflow as tf
from tf_modes import MODES, run

import horovod.tensorflow as hvd


def ranks():
    return range(hvd.size())


def test_the_older_argument_warns_and_both_are_refused():
    with pytest.warns(DeprecationWarning, match="average"):
        total = hvd.allreduce(tf.ones(2), average=False)
    np.testing.assert_array_equal(total, np.full(2, hvd.size()))
    with pytest.raises(ValueError, match="op parameter supersedes average"):
        hvd.allreduce(tf.ones(2), average=True, op=hvd.Sum)


@pytest.mark.parametrize("mode", MODES)
def test_compression_sends_half_and_gives_the_dtype_back(mode):
    own = np.array([0.1, 1.0 + hvd.rank()], np.float32)
    half, whole = run(
        mode,
        lambda x: [
            hvd.allreduce(x, op=hvd.Sum, compression=hvd.Compression.fp16),
            hvd.allreduce(tf.cast(x, tf.int32), op=hvd.Sum, compression=hvd.Compression.fp16),
        ],
        own,
    )
    assert half.dtype == np.float32
    assert whole.dtype == np.int32
    sent = np.array([0.1], np.float16).astype(np.float32)
    assert half[0] == pytest.approx(hvd.size() * sent[0], rel=1e-3)
    assert half[0] != np.float32(0.1) * hvd.size(), "nothing was rounded to half"


def test_compression_sends_half_of_shares_too():
    own = tf.fill((hvd.size(), 2), 0.1)
    half = hvd.reducescatter(own, op=hvd.Sum, compression=hvd.Compression.fp16).numpy()
    assert half.dtype == np.float32
    np.testing.assert_allclose(half, np.full((1, 2), 0.1 * hvd.size()), rtol=1e-2)
    assert half[0, 0] != np.float32(0.1) * hvd.size(), "nothing was rounded to half"


def test_a_compressor_of_ones_own():
    class Halved(hvd.Compression.none):
        @staticmethod
        def compress(tensor):
            return tensor / 2, "context"

        @staticmethod
        def decompress(tensor, ctx):
            assert ctx == "context"
            return tensor * 4

    total = hvd.allreduce(tf.ones(2), op=hvd.Sum, compression=Halved)
    np.testing.assert_array_equal(total, np.full(2, 2.0 * hvd.size()))


def slices(rank, dtype=np.float32):
    """Rank r has r + 1 rows, all ranks row 0."""
    rows = np.full((rank + 1, 2), 1 + rank, dtype)
    return rows, np.arange(rank + 1, dtype=np.int64)


def dense(rows, indices):
    whole = np.zeros((4, 2), rows.dtype)
    np.add.at(whole, indices, rows)
    return whole


@pytest.mark.parametrize("mode", MODES)
def test_slices_are_collected_and_equal_indices_add_up(mode):
    def reduce(rows, indices):
        given = tf.IndexedSlices(rows, indices, dense_shape=[4, 2])
        results = [hvd.allreduce(given, op=hvd.Sum), hvd.allreduce(given, name="named")]
        assert all(isinstance(result, tf.IndexedSlices) for result in results)
        return [tf.convert_to_tensor(result) for result in results] + [
            tf.convert_to_tensor(results[0].dense_shape)
        ]

    total, average, shape = run(mode, reduce, *slices(hvd.rank()))
    want = sum(dense(*slices(r)) for r in ranks())
    np.testing.assert_allclose(total, want)
    np.testing.assert_allclose(average, want / hvd.size(), rtol=1e-6)
    np.testing.assert_array_equal(shape, [4, 2])


@pytest.mark.parametrize("mode", MODES)
def test_groups_may_mix_slices_and_tensors(mode):
    def reduce(first, rows, indices, last):
        given = tf.IndexedSlices(rows, indices, dense_shape=[4, 2])
        results = hvd.grouped_allreduce([first, given, last], op=hvd.Sum)
        # The slices' own shape, not that of the tensor before them.
        return [
            results[0],
            tf.convert_to_tensor(results[1]),
            results[2],
            tf.convert_to_tensor(results[1].dense_shape),
        ]

    rows, indices = slices(hvd.rank())
    ones = np.ones(3, np.float32)
    first, middle, last, shape = run(mode, reduce, ones, rows, indices, 2 * ones)
    np.testing.assert_allclose(first, ones * hvd.size())
    np.testing.assert_allclose(middle, sum(dense(*slices(r)) for r in ranks()))
    np.testing.assert_allclose(last, 2 * ones * hvd.size())
    np.testing.assert_array_equal(shape, [4, 2])


def test_integer_slices_are_averaged_towards_zero():
    own = -4 if hvd.rank() == 0 else -3
    given = tf.IndexedSlices(tf.constant([[own]]), tf.constant([0]), tf.constant([1, 1]))
    result = hvd.allreduce(given)
    assert result.values.dtype == tf.int32
    assert result.values.numpy().tolist() == [[int((-3 * hvd.size() - 1) / hvd.size())]]


REFUSED = [
    ({"op": "min"}, NotImplementedError, "Only Sum and Average ops are supported"),
    ({"op": "product"}, NotImplementedError, "Only Sum and Average ops are supported"),
    ({"op": "adasum"}, NotImplementedError, "sparse_as_dense=True"),
    ({"prescale_factor": 2.0}, NotImplementedError, "not supported with tf.IndexedSlices"),
    ({"postscale_factor": 2.0}, NotImplementedError, "not supported with tf.IndexedSlices"),
    ({"op": 17}, ValueError, "17"),
]


@pytest.mark.parametrize(("options", "error", "text"), REFUSED)
def test_one_rank_alone_is_refused_before_anything_is_sent(options, error, text):
    """The others would wait for what had been sent."""
    if hvd.rank() == 0 or hvd.size() == 1:
        given = tf.IndexedSlices(*map(tf.constant, slices(0)))
        for call in (
            lambda: hvd.allreduce(given, **options),
            lambda: hvd.grouped_allreduce([tf.ones(2), given], **options),
        ):
            if options == {"op": 17}:
                continue
            with pytest.raises(error, match=text):
                call()
    np.testing.assert_array_equal(hvd.allreduce(tf.ones(2), op=hvd.Sum), np.full(2, hvd.size()))


def test_empty_lists_come_back():
    assert hvd.grouped_allreduce([]) == []
    assert hvd.grouped_reducescatter([]) == []


def test_gradients_flow_through_reductions_of_the_public_functions():
    x = tf.Variable([1.0, 2.0])
    with tf.GradientTape() as tape:
        y = hvd.allreduce(x * (hvd.rank() + 1.0), op=hvd.Sum)
    got = tape.gradient(y, x)
    np.testing.assert_allclose(got, np.full(2, (hvd.rank() + 1.0) * hvd.size()))
