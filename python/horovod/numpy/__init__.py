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

from horovod.common._collectives import Collectives, barrier, join, poll, synchronize
from horovod.common._objects import allgather_object, broadcast_object
from horovod.common._ops import Adasum, Average, Max, Min, Product, Sum
from horovod.common.basics import basics as _basics
from horovod.common.exceptions import HorovodInternalError, HorovodStalledError
from horovod.common.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from horovod.numpy._arrays import NumpyArrays

__all__ = [
    "Adasum",
    "Average",
    "HorovodInternalError",
    "HorovodStalledError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "cross_rank",
    "cross_size",
    "global_process_set",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]

init = _basics.init
shutdown = _basics.shutdown
is_initialized = _basics.is_initialized
is_homogeneous = _basics.is_homogeneous
rank = _basics.rank
size = _basics.size
local_rank = _basics.local_rank
local_size = _basics.local_size
cross_rank = _basics.cross_rank
cross_size = _basics.cross_size
start_timeline = _basics.start_timeline
stop_timeline = _basics.stop_timeline

_collectives = Collectives(NumpyArrays())
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
