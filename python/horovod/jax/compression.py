"""Compression of gradients for the wire: `Compression.none`, `Compression.fp16` and `Compression.bf16`."""

from typing import Any

import jax.numpy as jnp

from horovod.common._compression import Compressor, NoneCompressor

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class _CastCompressor(Compressor):
    sent_as: Any

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """Return the array in the smaller type if it is of a larger floating one, and its dtype."""
        dtype = jnp.result_type(tensor)
        if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 2:
            return jnp.asarray(tensor).astype(cls.sent_as), dtype
        return tensor, dtype

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        """Return the array in its original dtype; without one (no context) unchanged."""
        return tensor if ctx is None else tensor.astype(ctx)


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
