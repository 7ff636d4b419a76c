"""Functions for messages from the ranks of a HorovodRunner to the driver."""

from horovod.spark import log_to_driver

__all__ = ["log_to_driver"]
