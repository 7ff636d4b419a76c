"""HorovodRunner under the name by which notebooks import it."""

from horovod.spark import HorovodRunner

__all__ = ["HorovodRunner"]
