"""A callback that tells the driver how training goes."""

from horovod.spark.keras import LogCallback

__all__ = ["LogCallback"]
