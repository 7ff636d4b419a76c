"""Horovod on Spark: functions on ranks that run in Spark tasks."""

from horovod.spark._horovod_runner import HorovodRunner, log_to_driver
from horovod.spark.runner import run, run_elastic

__all__ = ["HorovodRunner", "log_to_driver", "run", "run_elastic"]
