"""Every operation and query of `horovod.torch`, under the import path that scripts know."""

from collections.abc import Sequence

import torch

from horovod import _core
from horovod.common._collectives import barrier
from horovod.common._ops import Adasum, Average, Max, Min, Product, Sum, resolve_op
from horovod.common.basics import basics as _basics
from horovod.common.exceptions import HorovodInternalError
from horovod.common.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from horovod.common.util import (
    check_extension,
    check_installed_version,
    gpu_available,
    num_rank_is_power_2,
)
from horovod.torch._allgather import (
    HorovodAllgather,
    HorovodGroupedAllgather,
    allgather,
    allgather_async,
    grouped_allgather,
    grouped_allgather_async,
)
from horovod.torch._allreduce import (
    HorovodAllreduce,
    HorovodGroupedAllreduce,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from horovod.torch._alltoall import HorovodAlltoall, alltoall, alltoall_async
from horovod.torch._broadcast import (
    HorovodBroadcast,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
)
from horovod.torch._handles import forget_job, note_join, poll, synchronize
from horovod.torch._original_attributes import HandleMap
from horovod.torch._reducescatter import (
    HorovodGroupedReducescatter,
    HorovodReducescatter,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from horovod.torch._sparse import sparse_allreduce_async
from horovod.torch.compression import Compression

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "HorovodAllgather",
    "HorovodAllreduce",
    "HorovodAlltoall",
    "HorovodBroadcast",
    "HorovodGroupedAllgather",
    "HorovodGroupedAllreduce",
    "HorovodGroupedReducescatter",
    "HorovodInternalError",
    "HorovodReducescatter",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
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
    "ccl_built",
    "check_extension",
    "check_installed_version",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "gpu_available",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "handle_average_backwards_compatibility",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "num_rank_is_power_2",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]

_handle_map = HandleMap()

is_initialized = _basics.is_initialized
start_timeline = _basics.start_timeline
stop_timeline = _basics.stop_timeline
size = _basics.size
local_size = _basics.local_size
cross_size = _basics.cross_size
rank = _basics.rank
local_rank = _basics.local_rank
cross_rank = _basics.cross_rank
is_homogeneous = _basics.is_homogeneous
mpi_threads_supported = _basics.mpi_threads_supported
mpi_enabled = _basics.mpi_enabled
mpi_built = _basics.mpi_built
gloo_enabled = _basics.gloo_enabled
gloo_built = _basics.gloo_built
nccl_built = _basics.nccl_built
ddl_built = _basics.ddl_built
ccl_built = _basics.ccl_built
cuda_built = _basics.cuda_built
rocm_built = _basics.rocm_built
shutdown = _basics.shutdown
handle_average_backwards_compatibility = resolve_op


def init(
    comm: Sequence[int] | None = None,
    process_sets: Sequence[ProcessSet] | str | None = None,
) -> None:
    """Connect this process with the others of its job.

    See `horovod.common.basics.HorovodBasics.init` for parameters and errors.
    """
    if not _basics.is_initialized():
        forget_job()
    _basics.init(comm, process_sets)


def join(device: int = -1) -> int:
    """Say that this rank has no more data, and wait until every rank said so.

    Meanwhile allreduces of the other ranks go on without this one: it contributes the identity of their
    operator, and `Average` divides by the number of all ranks (`HOROVOD_JOIN_AVERAGE=contributors`: of those
    that are left). Operations that need its data, such as allgather, fail on the ranks that call them. Afterwards all
    ranks may go on, such as with the next epoch.

    Parameters
    ----------
    device
        Accepted for scripts written for GPUs; nothing is allocated here.

    Returns
    -------
    int
        The global rank that joined last, the same on every rank.

    Raises
    ------
    HorovodInternalError
        A rank was lost, or Horovod is not initialised.
    """
    del device
    last = _core.join()
    note_join()
    return last


def _check_has_gpu() -> bool:
    return torch.cuda.is_available()
