"""Training of Lightning modules on Spark DataFrames."""

from horovod.spark.lightning.estimator import TorchEstimator, TorchModel
from horovod.spark.lightning.legacy import to_lightning_module

__all__ = ["TorchEstimator", "TorchModel", "to_lightning_module"]
