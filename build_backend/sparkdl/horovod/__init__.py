"""What ranks of a HorovodRunner tell the driver."""

from horovod.spark import log_to_driver

__all__ = ["log_to_driver"]
