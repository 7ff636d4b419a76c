"""Batch normalisation with common statistics of all ranks' batches, for Keras 3 and Keras 2."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from horovod import _absent
from horovod.common._ops import Sum
from horovod.common.process_sets import global_process_set
from horovod.tensorflow._allreduce import allreduce
from horovod.tensorflow._autograph import unconverted
from horovod.tensorflow._gradient_reduction import takes_part

__all__ = ["SyncBatchNormalization"]

if TYPE_CHECKING:
    SyncBatchNormalization: Any
    """The class that `layer_class` makes of Keras's `BatchNormalization`, with the same arguments: the mean and
    variance are those of all ranks' batches. Every rank has to run the layer in training."""


def __getattr__(name: str) -> Any:
    # The class is made at the first access: its base class is in Keras, whose import takes seconds.
    if name == "SyncBatchNormalization":
        try:
            return layer_class(tf.keras.layers.BatchNormalization)
        except ImportError as error:
            _absent.raise_unavailable(str(error))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@unconverted
def global_moments(
    inputs: Any, axes: Sequence[int], mask: Any = None, keepdims: bool = False
) -> tuple[Any, Any]:
    """Return the mean and biased variance over all ranks' values along some axes; every value has the same weight.

    Parameters
    ----------
    mask
        Samples, or time steps, that are included. The shape is that of the inputs without the last dimension, or one
        that broadcasts to it.

    Each rank sends the number, the sum and the sum of squares of its values in one allreduce. The values are float64,
    so that no digits are lost when the mean is large. Through the gradient of the allreduce, the gradients of the
    inputs equal those of one process with all values.
    """
    values = tf.cast(inputs, tf.float64)
    if mask is None:
        weights = tf.ones_like(values)
    else:
        shown = tf.cast(mask, tf.float64)
        shown = tf.expand_dims(shown, -1) if shown.shape.rank < values.shape.rank else shown
        weights = tf.broadcast_to(shown, tf.shape(values))
        values = tf.where(weights > 0, values, tf.zeros_like(values))
    sums = tf.stack(
        [
            tf.reduce_sum(weights, axes, keepdims=True),
            tf.reduce_sum(values, axes, keepdims=True),
            tf.reduce_sum(values * values, axes, keepdims=True),
        ]
    )
    condition = takes_part(global_process_set)
    if condition is not False:
        # This name scope replaces the layer's scope, whose name may differ between ranks. The graph numbers the calls.
        with tf.name_scope("SyncBatchNormalization/"):
            sums = allreduce(sums, op=Sum, name="sync_batch_norm")
    count, total, squares = tf.unstack(sums)
    mean = tf.math.divide_no_nan(total, count)
    variance = tf.maximum(tf.math.divide_no_nan(squares, count) - tf.square(mean), 0.0)
    if not keepdims:
        mean, variance = tf.squeeze(mean, axes), tf.squeeze(variance, axes)
    return tf.cast(mean, inputs.dtype), tf.cast(variance, inputs.dtype)


@functools.cache
def layer_class(base: Any) -> Any:
    """Return the synchronised layer class, which derives from `base`, a `BatchNormalization` of either Keras.

    Raises
    ------
    ImportError
        This version of Keras lacks the method that the layer replaces.
    """
    is_keras_2 = hasattr(base, "_calculate_mean_and_var")
    if not hasattr(base, "_moments"):
        raise ImportError(
            f"SyncBatchNormalization replaces _moments of {base.__module__}.BatchNormalization, which this version "
            "does not have: each rank would normalise alone. Use another version: tests run with Keras 3.15 and "
            "tf_keras 2.21."
        )

    class SyncBatchNormalization(base):
        """Batch normalisation with the common mean and variance of all ranks' batches.

        In training every rank has to run the layer. It makes one allreduce of a few numbers per channel in the forward
        pass, and one in the backward pass. Each value has the same weight, so batches may differ in size. In
        evaluation, or with one process, the layer behaves like Keras's layer.

        Parameters
        ----------
        fused
            Only False is supported.
        kwargs
            Arguments of Keras's `BatchNormalization`.

        Raises
        ------
        ValueError
            `fused` is True or None, or Keras 3 runs on another backend than TensorFlow.
        """

        def __init__(self, fused: bool | None = False, **kwargs: Any) -> None:
            if fused in (True, None):
                raise ValueError("SyncBatchNormalization does not support fused=True.")
            if is_keras_2:
                kwargs["fused"] = False
            elif tf.keras.backend.backend() != "tensorflow":
                raise ValueError(
                    "horovod.tensorflow.SyncBatchNormalization needs Keras's TensorFlow backend, but "
                    f"{tf.keras.backend.backend()} is in use."
                )
            super().__init__(**kwargs)

        if is_keras_2:

            def _moments(
                self, inputs: Any, reduction_axes: Any, keep_dims: bool, mask: Any = None
            ) -> Any:
                if takes_part(global_process_set) is False:
                    return super()._moments(inputs, reduction_axes, keep_dims, mask)
                return global_moments(inputs, reduction_axes, mask, keep_dims)

        else:

            def _moments(self, inputs: Any, mask: Any) -> Any:  # type: ignore[misc]
                if takes_part(global_process_set) is False:
                    return super()._moments(inputs, mask)
                return global_moments(inputs, self._reduction_axes, mask)

    SyncBatchNormalization.__qualname__ = "SyncBatchNormalization"
    return SyncBatchNormalization
