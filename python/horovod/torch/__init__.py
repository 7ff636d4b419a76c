"""Data-parallel training with PyTorch: `import horovod.torch as hvd`."""

import importlib.util
import sys

if importlib.util.find_spec("torch") is None:
    raise ModuleNotFoundError(
        f"horovod.torch needs PyTorch, which is not installed for {sys.executable}: pip install torch",
        name="torch",
    )

from horovod.common import api as _api
from horovod.common.api import *  # noqa: F403
from horovod.common.exceptions import ReplicasDifferError
from horovod.torch import _operations, elastic
from horovod.torch._consistency import check_consistency
from horovod.torch._operations import *  # noqa: F403
from horovod.torch.functions import broadcast_optimizer_state, broadcast_parameters
from horovod.torch.mpi_ops import _check_has_gpu as _check_has_gpu
from horovod.torch.optimizer import DistributedOptimizer
from horovod.torch.sync_batch_norm import SyncBatchNorm

__all__ = [
    "DistributedOptimizer",
    "ReplicasDifferError",
    "SyncBatchNorm",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "check_consistency",
    "elastic",
]
__all__ += _api.__all__
__all__ += _operations.__all__
