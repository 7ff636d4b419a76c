"""Python objects as text, for command lines and environment variables of launchers."""

import base64
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

__all__ = ["dumps_base64", "loads_base64"]


def loads_base64(encoded: str | bytes) -> Any:
    """Unpickle what `dumps_base64` gave. Only for text from a trusted source: pickles can run any code."""
    return cloudpickle.loads(base64.b64decode(encoded))


def dumps_base64(obj: Any, to_ascii: bool = True) -> str | bytes:
    """Pickle an object, functions of `__main__` included, into base64; as bytes if `to_ascii` is false."""
    encoded = base64.b64encode(cloudpickle.dumps(obj))
    return encoded.decode("ascii") if to_ascii else encoded
