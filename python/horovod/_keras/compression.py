"""Compression of gradients for the wire with any backend of Keras 3: `Compression.none` and `Compression.fp16`."""

from __future__ import annotations

import sys
from typing import Any

from horovod.common._compression import CastCompressor, Compressor, NoneCompressor

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class FP16Compressor(CastCompressor):
    """Sends floating tensors as float16. They are reduced as such, so large sums may overflow."""

    @staticmethod
    def dtype_of(tensor: Any) -> str:
        """The name of the type of a tensor's elements."""
        return str(sys.modules["keras"].backend.standardize_dtype(tensor.dtype))

    @staticmethod
    def cast(tensor: Any, dtype: str) -> Any:
        """The tensor in another type."""
        return sys.modules["keras"].ops.cast(tensor, dtype)


class Compression:
    """The compression algorithms to choose from; each is a class that is passed as it is."""

    none = NoneCompressor
    """Send tensors as they are."""

    fp16 = FP16Compressor
    """Send floating tensors as float16."""
