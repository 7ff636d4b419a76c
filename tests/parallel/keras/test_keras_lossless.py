"""Operations on single values: a value that the backend cannot hold is an error."""

import numpy as np
import pytest
from keras_support import BACKEND, SIZE

import horovod.keras as hvd

BIG = 1_500_000_000


def test_sums_of_integers_are_exact_or_an_error():
    for value in (BIG, np.int64(BIG)):
        try:
            result = hvd.allreduce(value, average=False, op=hvd.Sum)
        except OverflowError:
            assert (BACKEND, SIZE) == ("jax", SIZE)
            assert SIZE > 1
        else:
            assert int(result) == BIG * SIZE


def test_sums_of_lists_of_integers_are_exact_or_an_error():
    for value in ([BIG, 1], (BIG,), [[1], [BIG]]):
        try:
            result = hvd.allreduce(value, average=False, op=hvd.Sum)
        except OverflowError:
            assert SIZE > 1
        else:
            assert np.array(result).tolist() == (np.array(value) * SIZE).tolist()


def test_integers_that_wrap_before_they_are_converted_are_an_error():
    for value, op in ((2**33, "product"), ([np.int64(2**33)], "product"), (2**62, "sum")):
        if SIZE > 1:
            with pytest.raises(OverflowError, match=f"the {op} of {SIZE} such integers"):
                hvd.allreduce(value, op=op)


def test_a_list_of_numbers_that_do_not_fit_is_an_error():
    with pytest.raises((OverflowError, ValueError), match=r"does not fit|out of range"):
        result = hvd.allreduce([0.1, 1e300])
        assert float(result[1]) == 1e300, result
        raise OverflowError("kept: does not fit is for other backends")


def test_small_integers_have_the_type_that_keras_gives_them():
    import keras

    result = hvd.allreduce(5, op=hvd.Sum)
    assert keras.backend.standardize_dtype(result.dtype) == "int32"
    assert int(result) == 5 * SIZE


def test_numbers_that_do_not_fit_are_errors():
    for operation in (hvd.allreduce, lambda x: hvd.broadcast(x, 0)):
        # TensorFlow itself refuses the number.
        with pytest.raises(
            (OverflowError, ValueError), match=r"does not fit into float32|out of range"
        ):
            value = operation(1e300)
            assert float(value) == 1e300, value
            raise OverflowError("kept: does not fit into float32 is for other backends")
