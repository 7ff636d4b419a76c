"""Collective operations on NumPy arrays: `import horovod.numpy as hvd`.

For programs that have no framework, or beside one: metrics, evaluation, preprocessing, scientific code. Names,
arguments and meaning are those of `horovod.torch`; what returns new tensors there returns new arrays here, what ends in
`_` works in place.

Examples
--------
>>> import numpy as np
>>> import horovod.numpy as hvd
>>> hvd.init()
>>> total = hvd.allreduce(np.array([loss * n, n]), op=hvd.Sum)
"""

import importlib.util
import sys

if importlib.util.find_spec("numpy") is None:
    raise ModuleNotFoundError(
        f"horovod.numpy needs NumPy, which is not installed for {sys.executable}: pip install numpy",
        name="numpy",
    )

from horovod.common import api as _api
from horovod.common._numpy_arrays import NumpyCollectives
from horovod.common._waiting import synchronize
from horovod.common.api import *  # noqa: F403
from horovod.common.api import is_homogeneous
from horovod.common.host_memory import nccl_built as nccl_built

__all__ = [
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "is_homogeneous",
    "reducescatter",
    "reducescatter_async",
    "synchronize",
]
__all__ += _api.__all__

_collectives = NumpyCollectives()
allreduce = _collectives.allreduce
allreduce_ = _collectives.allreduce_
allreduce_async = _collectives.allreduce_async
allreduce_async_ = _collectives.allreduce_async_
grouped_allreduce = _collectives.grouped_allreduce
grouped_allreduce_ = _collectives.grouped_allreduce_
grouped_allreduce_async = _collectives.grouped_allreduce_async
grouped_allreduce_async_ = _collectives.grouped_allreduce_async_
allgather = _collectives.allgather
allgather_async = _collectives.allgather_async
grouped_allgather = _collectives.grouped_allgather
grouped_allgather_async = _collectives.grouped_allgather_async
broadcast = _collectives.broadcast
broadcast_ = _collectives.broadcast_
broadcast_async = _collectives.broadcast_async
broadcast_async_ = _collectives.broadcast_async_
alltoall = _collectives.alltoall
alltoall_async = _collectives.alltoall_async
reducescatter = _collectives.reducescatter
reducescatter_async = _collectives.reducescatter_async
grouped_reducescatter = _collectives.grouped_reducescatter
grouped_reducescatter_async = _collectives.grouped_reducescatter_async
