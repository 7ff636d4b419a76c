"""Every operation and query of `horovod.tensorflow`, under an import path of the original."""

import tensorflow as tf

from horovod.common import api as _api
from horovod.common._ops import resolve_op
from horovod.common.api import *  # noqa: F403
from horovod.common.api import is_homogeneous
from horovod.common.basics import basics
from horovod.common.host_memory import nccl_built as nccl_built
from horovod.common.util import check_extension, gpu_available, num_rank_is_power_2
from horovod.tensorflow import _gradients
from horovod.tensorflow._operations import (  # type: ignore[assignment]
    MPI_LIB,
    _allreduce,
    _grouped_allreduce,
    _grouped_reducescatter,
    _normalize_name,
    _reducescatter,
    allgather,
    alltoall,
    broadcast,
    broadcast_,
    grouped_allgather,
    join,
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    size_op,
)

__all__ = [
    "MPI_LIB",
    "_allreduce",
    "_check_has_gpu",
    "_grouped_allreduce",
    "_grouped_reducescatter",
    "_normalize_name",
    "_reducescatter",
    "allgather",
    "alltoall",
    "broadcast",
    "broadcast_",
    "check_extension",
    "gpu_available",
    "grouped_allgather",
    "handle_average_backwards_compatibility",
    "is_homogeneous",
    "join",
    "local_rank_op",
    "local_size_op",
    "num_rank_is_power_2",
    "process_set_included_op",
    "rank_op",
    "size_op",
]
# Names of `api` that are not exported here: other functions replace them, or TensorFlow has no counterpart.
_OTHERS = ("allgather_object", "barrier", "broadcast_object", "join", "poll")
__all__ += [name for name in _api.__all__ if name not in _OTHERS]

_basics = basics
_registered_gradients = _gradients.REGISTERED

handle_average_backwards_compatibility = resolve_op


def _check_has_gpu() -> bool:
    return bool(tf.config.list_physical_devices("GPU"))
