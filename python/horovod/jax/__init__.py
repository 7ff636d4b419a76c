"""Data-parallel training with JAX: `import horovod.jax as hvd`."""

import importlib.util
import sys

if importlib.util.find_spec("jax") is None:
    raise ModuleNotFoundError(
        f"horovod.jax needs JAX, which is not installed for {sys.executable}: pip install jax",
        name="jax",
    )

import horovod.jax._pending  # noqa: F401 - for what it registers
from horovod.common import api as _api
from horovod.common.api import *  # noqa: F403
from horovod.common.api import is_homogeneous
from horovod.common.host_memory import nccl_built as nccl_built
from horovod.jax import _operations, elastic
from horovod.jax._operations import *  # noqa: F403
from horovod.jax.compression import Compression
from horovod.jax.functions import broadcast_parameters
from horovod.jax.optimizer import (
    DistributedOptimizer,
    allreduce_gradients,
    grad,
    value_and_grad,
)

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "allreduce_gradients",
    "broadcast_parameters",
    "elastic",
    "grad",
    "is_homogeneous",
    "value_and_grad",
]
__all__ += _api.__all__
__all__ += _operations.__all__
__all__.remove("poll")
