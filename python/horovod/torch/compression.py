"""Compression of gradients for the wire: `Compression.none` and `Compression.fp16`."""

import torch

from horovod.common._compression import CastCompressor, Compressor, NoneCompressor

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class FP16Compressor(CastCompressor):
    """Sends floating tensors as float16. They are reduced as such, so large sums may overflow."""

    sent_as = torch.float16

    @classmethod
    def is_cast(cls, dtype: torch.dtype) -> bool:
        """Whether tensors of this type are sent in the smaller one."""
        return dtype.is_floating_point and dtype is not torch.float16

    @staticmethod
    def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The tensor in another type."""
        return tensor.to(dtype)


class Compression:
    """The compression algorithms to choose from; each is a class that is passed as it is."""

    none = NoneCompressor
    """Send tensors as they are."""

    fp16 = FP16Compressor
    """Send floating tensors as float16."""
