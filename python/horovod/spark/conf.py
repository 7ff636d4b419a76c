"""Settings of Spark for elastic jobs, as pairs of key and value for `SparkSession.builder.config`."""

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
