"""Training of Keras models on Spark DataFrames."""

from horovod.spark.keras.estimator import KerasEstimator, KerasModel
from horovod.spark.keras.log_callback import LogCallback

__all__ = ["KerasEstimator", "KerasModel", "LogCallback"]
