"""Compression of gradients for the wire, as far as it does not depend on the framework."""

from abc import abstractmethod
from typing import Any, ClassVar


class Compressor:
    """Interface: how a tensor is made smaller before it is sent, and restored afterwards.

    Any object with these two callables may be passed as `compression`; the classes here are passed as
    classes, never as instances.
    """

    @staticmethod
    @abstractmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor to send and a context, which `decompress` gets back."""

    @staticmethod
    @abstractmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the received tensor in its original form."""


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the same object and no context."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the same object."""
        del ctx
        return tensor


class CastCompressor(Compressor):
    """Sends floating tensors in a smaller type; a framework's subclass says how its types are called.

    They are reduced as such, so large sums may overflow in float16.
    """

    sent_as: ClassVar[Any] = "float16"
    """The smaller type."""

    @staticmethod
    def dtype_of(tensor: Any) -> Any:
        """The type of a tensor's elements."""
        return tensor.dtype

    @classmethod
    def is_cast(cls, dtype: Any) -> bool:
        """Whether tensors of this type are sent in the smaller one."""
        return "float" in str(dtype) and str(dtype) != cls.sent_as

    @staticmethod
    @abstractmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        """The tensor in another type."""

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """Return the tensor in the smaller type if it is of a larger floating one, and its own type."""
        dtype = cls.dtype_of(tensor)
        return (cls.cast(tensor, cls.sent_as) if cls.is_cast(dtype) else tensor), dtype

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        """Return the tensor in its original type; without one (no context) unchanged."""
        return tensor if ctx is None or not cls.is_cast(ctx) else cls.cast(tensor, ctx)
