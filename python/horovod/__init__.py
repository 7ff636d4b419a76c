"""Horovod: data-parallel training on many processes; import a framework's module, such as `horovod.torch`."""

from typing import Any

from horovod._core import __version__

__all__ = ["__version__"]


def __getattr__(name: str) -> Any:
    if name == "run":
        # Scripts say `from horovod import run`: an ImportError is the one that shows them this text.
        raise ImportError(
            "horovod.run is not available in this version; start the script with horovodrun instead, "
            "e.g. horovodrun -np 2 python train.py"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
