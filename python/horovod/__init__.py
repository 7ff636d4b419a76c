"""Horovod: data-parallel training on many processes; import a framework's module, such as `horovod.torch`."""

from horovod import _absent, _installation
from horovod._core import __version__
from horovod.runner import run

__all__ = ["__version__", "run"]

_installation.warn_if_mixed(__path__[0])
_absent.install()
