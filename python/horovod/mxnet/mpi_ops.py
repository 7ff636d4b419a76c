"""Every operation and query of `horovod.mxnet`, under the import path that scripts know."""

import mxnet as mx

from horovod.common import api as _api
from horovod.common._ops import resolve_op
from horovod.common.api import *  # noqa: F403
from horovod.common.api import is_homogeneous
from horovod.common.basics import basics
from horovod.common.host_memory import nccl_built as nccl_built
from horovod.mxnet import _operations
from horovod.mxnet._operations import *  # noqa: F403
from horovod.mxnet._operations import join

__all__ = [
    "MPI_MXNET_LIB_CTYPES",
    "handle_average_backwards_compatibility",
    "is_homogeneous",
    "join",
]
__all__ += _api.__all__
__all__ += _operations.__all__

_basics = basics

MPI_MXNET_LIB_CTYPES = basics.MPI_LIB_CTYPES

handle_average_backwards_compatibility = resolve_op


def _check_has_gpu() -> bool:
    return bool(mx.context.num_gpus() > 0)
