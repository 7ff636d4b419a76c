"""Training of Keras models on Spark DataFrames."""

from horovod.spark.keras.callbacks import LogCallback, ProgressCallback
from horovod.spark.keras.estimator import KerasEstimator, KerasModel

__all__ = ["KerasEstimator", "KerasModel", "LogCallback", "ProgressCallback"]
