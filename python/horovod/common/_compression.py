"""Compression of gradients for the wire, as far as it does not depend on the framework."""

from abc import abstractmethod
from typing import Any


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
