"""Compression of gradients for the wire: `Compression.none` and `Compression.fp16`."""

from typing import Any

import numpy as np

from horovod.common._compression import CastCompressor, Compressor, NoneCompressor
from horovod.mxnet._arrays import NDArray

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class FP16Compressor(CastCompressor):
    """Sends floating arrays as float16. They are reduced as such, so large sums may overflow."""

    @staticmethod
    def dtype_of(tensor: NDArray) -> str:
        """The name of the type of an array's elements."""
        return str(np.dtype(tensor.dtype))

    @staticmethod
    def cast(tensor: NDArray, dtype: Any) -> NDArray:
        """The array in another type."""
        return tensor.astype(dtype, copy=False)


class Compression:
    """The compression algorithms to choose from; each is a class that is passed as it is."""

    none = NoneCompressor
    """Send arrays as they are."""

    fp16 = FP16Compressor
    """Send floating arrays as float16."""
