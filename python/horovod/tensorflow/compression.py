"""Compression of gradients for the wire: `Compression.none` and `Compression.fp16`."""

from typing import Any

import tensorflow as tf

from horovod.common._compression import CastCompressor, Compressor, NoneCompressor

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class FP16Compressor(CastCompressor):
    """Sends floating tensors as float16. They are reduced as such, so large sums may overflow."""

    sent_as = tf.float16

    @classmethod
    def is_cast(cls, dtype: Any) -> bool:
        """Whether tensors of this type are sent in the smaller one."""
        return bool(dtype.is_floating and dtype != tf.float16)

    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        """The tensor in another type."""
        return tf.cast(tensor, dtype)


class Compression:
    """The compression algorithms to choose from; each is a class that is passed as it is."""

    none = NoneCompressor
    """Send tensors as they are."""

    fp16 = FP16Compressor
    """Send floating tensors as float16."""
