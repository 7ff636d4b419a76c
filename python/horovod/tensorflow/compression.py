"""Compression of sent gradients: `Compression.none` and `Compression.fp16`."""

from typing import Any

import tensorflow as tf

from horovod.common._compression import CastCompressor, Compressor, NoneCompressor

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class FP16Compressor(CastCompressor):
    """Sends floating tensors as float16. The reduction also uses float16, so large sums may overflow."""

    sent_as = tf.float16

    @classmethod
    def is_cast(cls, dtype: Any) -> bool:
        """Return whether tensors of this type are sent as float16."""
        return bool(dtype.is_floating and dtype != tf.float16)

    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        """Return the tensor converted to another type."""
        return tf.cast(tensor, dtype)


class Compression:
    """The available compression algorithms; pass one of these classes without calling it."""

    none = NoneCompressor
    """Send tensors without conversion."""

    fp16 = FP16Compressor
    """Send floating tensors as float16."""
