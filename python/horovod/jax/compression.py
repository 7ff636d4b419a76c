"""Compression of gradients for the wire: `Compression.none`, `Compression.fp16` and `Compression.bf16`."""

from typing import Any

import jax.numpy as jnp

from horovod.common._compression import CastCompressor, Compressor, NoneCompressor

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class _CastCompressor(CastCompressor):
    @staticmethod
    def dtype_of(tensor: Any) -> Any:
        """The type of an array's elements, or of a number."""
        return jnp.result_type(tensor)

    @classmethod
    def is_cast(cls, dtype: Any) -> bool:
        """Whether arrays of this type are sent in the smaller one."""
        return bool(jnp.issubdtype(dtype, jnp.floating)) and dtype.itemsize > 2

    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        """The array in another type."""
        return jnp.asarray(tensor).astype(dtype)


class FP16Compressor(_CastCompressor):
    """Sends floats as float16. They are reduced as such, so large sums may overflow."""

    sent_as = jnp.float16


class BF16Compressor(_CastCompressor):
    """Sends floats as bfloat16, which has the range of float32 and 8 bits of precision."""

    sent_as = jnp.bfloat16


class Compression:
    """The compression algorithms to choose from; each is a class that is passed as it is."""

    none = NoneCompressor
    """Send arrays as they are."""

    fp16 = FP16Compressor
    """Send floating arrays as float16."""

    bf16 = BF16Compressor
    """Send floating arrays as bfloat16."""
