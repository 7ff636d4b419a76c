"""Compression of gradients for the wire: `Compression.none` and `Compression.fp16`."""

from typing import Any

import tensorflow as tf

from horovod.common._compression import Compressor, NoneCompressor

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class FP16Compressor(Compressor):
    """Sends floating tensors as float16. They are reduced as such, so large sums may overflow."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor as float16 if it is floating, unchanged otherwise, and its dtype."""
        dtype = tensor.dtype
        if dtype.is_floating and dtype != tf.float16:
            tensor = tf.cast(tensor, tf.float16)
        return tensor, dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor in its original dtype; without one (no context) unchanged."""
        if ctx is not None and ctx.is_floating and tensor.dtype != ctx:
            tensor = tf.cast(tensor, ctx)
        return tensor


class Compression:
    """The compression algorithms to choose from; each is a class that is passed as it is."""

    none = NoneCompressor
    """Send tensors as they are."""

    fp16 = FP16Compressor
    """Send floating tensors as float16."""
