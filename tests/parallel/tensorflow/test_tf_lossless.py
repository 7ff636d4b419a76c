"""Arguments that are no integers are not cut off, and slices are reduced as dense tensors are."""

import numpy as np
import pytest
import tensorflow as tf

import horovod.tensorflow as hvd


@pytest.mark.parametrize("count", [np.float64(0.5), np.float32(1), np.int64(2**32 + 1), 0.5, True])
def test_splits_are_integers(count):
    for kind in (list, np.array):
        with pytest.raises(ValueError, match="1D list of 32-bit integers as splits"):
            hvd.alltoall(tf.zeros(2 * hvd.size()), splits=kind([count] * hvd.size()))


def test_integers_of_all_kinds_are_splits():
    one = tf.constant(1)
    for splits in ([1], np.array([1]), np.array([1], np.uint8), tf.constant([1]), [one], (1,)):
        many = (
            splits * hvd.size()
            if isinstance(splits, (list, tuple))
            else np.repeat(splits, hvd.size())
        )
        received, counts = hvd.alltoall(tf.ones(hvd.size()), splits=many)
        assert received.numpy().tolist() == counts.numpy().tolist() == [1] * hvd.size()


@pytest.mark.parametrize("root", [0.0, 0.5, np.float32(0)])
def test_a_root_rank_is_an_integer(root):
    with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
        hvd.broadcast(tf.zeros(1), root)


@pytest.mark.parametrize("is_graph", [False, True])
@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average])
@pytest.mark.parametrize("dtype", ["int32", "int64", "float16", "float32", "float64"])
def test_slices_and_dense_tensors_agree(dtype, op, is_graph):
    # Row 0 is on all ranks, twice on each; row 1 on one rank only.
    rows = [0, 0, *([1] if hvd.rank() == 0 else []), 2 + hvd.rank()]
    values = np.arange(1, len(rows) + 1)[:, None].astype(dtype) * np.array([3, -3], dtype)
    slices = tf.IndexedSlices(
        tf.constant(values), tf.constant(rows), tf.constant([2 + hvd.size(), 2])
    )

    def reduced():
        slices_too = hvd.allreduce(slices, op=op, name="slices")
        return tf.convert_to_tensor(slices_too), hvd.allreduce(
            tf.convert_to_tensor(slices), op=op, name="dense"
        )

    sparse, dense = tf.function(reduced)() if is_graph else reduced()
    if dtype.startswith("int"):
        np.testing.assert_array_equal(sparse, dense)
    else:
        np.testing.assert_allclose(sparse, dense, rtol=2e-3 if dtype == "float16" else 1e-6)


@pytest.mark.parametrize("is_graph", [False, True])
@pytest.mark.parametrize(
    "call",
    [
        lambda: hvd.allreduce(1_500_000_000, op=hvd.Sum),
        lambda: hvd.allreduce([1, -1_500_000_000], op=hvd.Sum),
        lambda: hvd.grouped_allreduce([1, (1_500_000_000,)], op=hvd.Sum),
        lambda: hvd.reducescatter([1_500_000_000] * 12, op=hvd.Sum),
        lambda: hvd.allreduce(70_000, op=hvd.Product),
        lambda: hvd.allreduce(2**22, op=hvd.Product),
        lambda: hvd.allreduce(2**20, op=hvd.Sum, postscale_factor=2.0**12),
    ],
    ids=["number", "list", "group", "scattered", "product", "power", "factor"],
)
def test_a_python_integer_whose_result_needs_more_than_32_bits_is_an_error(call, is_graph):
    if hvd.size() == 1:
        pytest.skip("needs several ranks")
    with pytest.raises(OverflowError, match=r"int32.* pass tf\.constant\(\.\.\., tf\.int64\)"):
        (tf.function(call, autograph=False) if is_graph else call)()


def test_other_python_integers_are_reduced():
    total = hvd.allreduce(5, op=hvd.Sum)
    assert (int(total), total.dtype) == (5 * hvd.size(), tf.int32)
    # One rank has a value of which all ranks together would have too much.
    mine = 2_000_000_000 if hvd.rank() == 0 else 1
    total = hvd.allreduce([mine, 7], op=hvd.Sum)
    assert total.numpy().tolist() == [2_000_000_000 + hvd.size() - 1, 7 * hvd.size()]
    mixed = hvd.allreduce([1_500_000_000, 0.5], op=hvd.Sum)
    assert mixed.dtype == tf.float32
    assert int(hvd.allreduce(1_500_000_000)) == 1_500_000_000
    assert int(hvd.allreduce(2**40, op=hvd.Sum)) == 2**40 * hvd.size()
    assert int(hvd.allreduce(tf.constant(2**31, tf.int64), op=hvd.Sum)) == 2**31 * hvd.size()
