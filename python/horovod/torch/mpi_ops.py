"""Every operation and query of `horovod.torch`, under the import path that scripts know."""

import torch

from horovod.common import api as _api
from horovod.common._handle_map import HandleMap
from horovod.common._ops import resolve_op
from horovod.common.api import *  # noqa: F403
from horovod.common.api import is_homogeneous
from horovod.common.basics import basics
from horovod.common.util import check_installed_version, gpu_available, num_rank_is_power_2
from horovod.torch import _operations
from horovod.torch._allgather import HorovodAllgather, HorovodGroupedAllgather
from horovod.torch._allreduce import HorovodAllreduce, HorovodGroupedAllreduce
from horovod.torch._alltoall import HorovodAlltoall
from horovod.torch._broadcast import HorovodBroadcast
from horovod.torch._operations import *  # noqa: F403
from horovod.torch._reducescatter import HorovodGroupedReducescatter, HorovodReducescatter

__all__ = [
    "HorovodAllgather",
    "HorovodAllreduce",
    "HorovodAlltoall",
    "HorovodBroadcast",
    "HorovodGroupedAllgather",
    "HorovodGroupedAllreduce",
    "HorovodGroupedReducescatter",
    "HorovodReducescatter",
    "check_installed_version",
    "gpu_available",
    "handle_average_backwards_compatibility",
    "is_homogeneous",
    "num_rank_is_power_2",
]
__all__ += _api.__all__
__all__ += _operations.__all__

_basics = basics
_handle_map = HandleMap()

handle_average_backwards_compatibility = resolve_op


def _check_has_gpu() -> bool:
    return torch.cuda.is_available()
