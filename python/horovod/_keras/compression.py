"""Compression of gradients for the wire with any backend of Keras 3: `Compression.none` and `Compression.fp16`."""

from __future__ import annotations

import sys
from typing import Any

from horovod.common._compression import Compressor, NoneCompressor

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class FP16Compressor(Compressor):
    """Sends floating tensors as float16. They are reduced as such, so large sums may overflow."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor as float16 if it is floating, unchanged otherwise, and its dtype."""
        keras: Any = sys.modules["keras"]
        dtype = keras.backend.standardize_dtype(tensor.dtype)
        if "float" in dtype and dtype != "float16":
            tensor = keras.ops.cast(tensor, "float16")
        return tensor, dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor in its original dtype; without one (no context) unchanged."""
        if ctx is not None and "float" in ctx and ctx != "float16":
            keras: Any = sys.modules["keras"]
            tensor = keras.ops.cast(tensor, ctx)
        return tensor


class Compression:
    """The compression algorithms to choose from; each is a class that is passed as it is."""

    none = NoneCompressor
    """Send tensors as they are."""

    fp16 = FP16Compressor
    """Send floating tensors as float16."""
