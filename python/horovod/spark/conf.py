"""Settings of Spark for elastic jobs, as pairs of key and value for `SparkSession.builder.config`."""

from typing import NoReturn

from horovod import _absent

__all__ = [
    "SPARK_CONF_ALWAYS_RESTART_FAILED_TASK",
    "SPARK_CONF_BLACKLIST_DISABLED",
    "SPARK_CONF_DEFAULT_VALUES",
]

# A lost rank comes back with its task, which Spark starts again so often.
SPARK_CONF_ALWAYS_RESTART_FAILED_TASK = ("spark.task.maxFailures", "999999999")
SPARK_CONF_BLACKLIST_DISABLED = ("spark.excludeOnFailure.enabled", "false")

SPARK_CONF_DEFAULT_VALUES = {
    "spark.task.maxFailures": "4",
    "spark.excludeOnFailure.enabled": "false",
    "spark.speculation": "false",
}


def __getattr__(name: str) -> NoReturn:
    if name.startswith("SPARK_CONF_"):
        _absent.raise_unavailable(
            f"horovod.spark.conf.{name} of the original Horovod does not exist in horovod-rs: pass Spark's "
            "setting by its name, such as builder.config('spark.excludeOnFailure.enabled', 'false')"
        )
    _absent.raise_missing(__name__, name)
