"""Data-parallel training with MXNet 1.9: `import horovod.mxnet as hvd`."""

import importlib.util
import sys

if importlib.util.find_spec("mxnet") is None:
    raise ModuleNotFoundError(
        f"horovod.mxnet needs MXNet, which is not installed for {sys.executable}: pip install mxnet==1.9.1 "
        "numpy==1.23.5",
        name="mxnet",
    )

from horovod.common import api as _api
from horovod.common.api import *  # noqa: F403
from horovod.common.api import is_homogeneous
from horovod.common.host_memory import nccl_built as nccl_built
from horovod.mxnet import _operations
from horovod.mxnet._operations import *  # noqa: F403
from horovod.mxnet._operations import join
from horovod.mxnet.compression import Compression
from horovod.mxnet.functions import broadcast_parameters
from horovod.mxnet.mpi_ops import _check_has_gpu as _check_has_gpu
from horovod.mxnet.optimizer import DistributedOptimizer, DistributedTrainer

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "DistributedTrainer",
    "broadcast_parameters",
    "is_homogeneous",
    "join",
]
__all__ += _api.__all__
__all__ += _operations.__all__
