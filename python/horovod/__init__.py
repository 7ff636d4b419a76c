"""Horovod: data-parallel training on many processes; import a framework's module, such as `horovod.torch`."""

from typing import TYPE_CHECKING, Any

from horovod._core import __version__

if TYPE_CHECKING:
    from horovod.runner import run

__all__ = ["__version__", "run"]


def __getattr__(name: str) -> Any:
    # `horovod.run` is needed by launching scripts only; training processes should not pay for its imports.
    if name == "run":
        from horovod.runner import run

        return run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
