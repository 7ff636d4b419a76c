"""The public names that are the same in every framework's module, which re-exports them with `import *`.

Beside them `is_homogeneous`, which not every framework's module has.
"""

from horovod.common._checkpoint import Checkpoint
from horovod.common._objects import allgather_object, broadcast_object
from horovod.common._ops import Adasum, Average, Max, Min, Product, Sum
from horovod.common._script_helpers import (
    average_metrics,
    check_finite,
    global_gradient_norm,
    on_rank_zero,
    rank_logger,
)
from horovod.common._waiting import barrier, join, poll
from horovod.common.basics import basics
from horovod.common.exceptions import HorovodInternalError, HorovodStalledError
from horovod.common.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from horovod.common.util import check_extension

__all__ = [
    "Adasum",
    "Average",
    "Checkpoint",
    "HorovodInternalError",
    "HorovodStalledError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather_object",
    "average_metrics",
    "barrier",
    "broadcast_object",
    "ccl_built",
    "check_extension",
    "check_finite",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_gradient_norm",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "on_rank_zero",
    "phase",
    "poll",
    "rank",
    "rank_logger",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stats",
    "step",
    "stop_timeline",
]

init = basics.init
shutdown = basics.shutdown
is_initialized = basics.is_initialized
start_timeline = basics.start_timeline
stats = basics.stats
step = basics.step
phase = basics.phase
stop_timeline = basics.stop_timeline
size = basics.size
local_size = basics.local_size
cross_size = basics.cross_size
rank = basics.rank
local_rank = basics.local_rank
cross_rank = basics.cross_rank
is_homogeneous = basics.is_homogeneous
mpi_threads_supported = basics.mpi_threads_supported
mpi_enabled = basics.mpi_enabled
mpi_built = basics.mpi_built
gloo_enabled = basics.gloo_enabled
gloo_built = basics.gloo_built
nccl_built = basics.nccl_built
ddl_built = basics.ddl_built
ccl_built = basics.ccl_built
cuda_built = basics.cuda_built
rocm_built = basics.rocm_built
