"""Compression of gradients for the wire: `Compression.none` and `Compression.fp16`."""

from typing import Any

from horovod.common._compression import Compressor, NoneCompressor
from horovod.mxnet._arrays import NDArray

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class FP16Compressor(Compressor):
    """Sends floating arrays as float16. They are reduced as such, so large sums may overflow."""

    @staticmethod
    def compress(tensor: NDArray) -> tuple[NDArray, Any]:
        """Return the array as float16 if it is floating, unchanged otherwise, and its dtype."""
        dtype = tensor.dtype
        return tensor.astype("float16", copy=False) if "float" in str(dtype) else tensor, dtype

    @staticmethod
    def decompress(tensor: NDArray, ctx: Any) -> NDArray:
        """Return the array in its original dtype."""
        return tensor.astype(ctx, copy=False) if "float" in str(ctx) else tensor


class Compression:
    """The compression algorithms to choose from; each is a class that is passed as it is."""

    none = NoneCompressor
    """Send arrays as they are."""

    fp16 = FP16Compressor
    """Send floating arrays as float16."""
