"""Compression of sent gradients with any backend of Keras 3: `Compression.none` and `Compression.fp16`."""

from __future__ import annotations

import sys
from typing import Any

from horovod.common._compression import CastCompressor, Compressor, NoneCompressor

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class FP16Compressor(CastCompressor):
    """Sends floating tensors as float16. The reduction also uses float16, so large sums may overflow."""

    @staticmethod
    def dtype_of(tensor: Any) -> str:
        """Return the name of a tensor's dtype."""
        return str(sys.modules["keras"].backend.standardize_dtype(tensor.dtype))

    @staticmethod
    def cast(tensor: Any, dtype: str) -> Any:
        """Return the tensor converted to another type."""
        return sys.modules["keras"].ops.cast(tensor, dtype)


class Compression:
    """The available compression algorithms; pass one of these classes without calling it."""

    none = NoneCompressor
    """Send tensors without conversion."""

    fp16 = FP16Compressor
    """Send floating tensors as float16."""
