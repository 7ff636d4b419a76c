"""Data-parallel training with TensorFlow: `import horovod.tensorflow as hvd`."""

import importlib.util
import sys
from typing import TYPE_CHECKING, Any

if importlib.util.find_spec("tensorflow") is None:
    raise ModuleNotFoundError(
        f"horovod.tensorflow needs TensorFlow, which is not installed for {sys.executable}: pip install tensorflow",
        name="tensorflow",
    )

from horovod import _absent
from horovod.common import api as _api
from horovod.common._ops import resolve_op as handle_average_backwards_compatibility
from horovod.common.api import *  # noqa: F403
from horovod.common.api import is_homogeneous
from horovod.common.host_memory import nccl_built as nccl_built
from horovod.common.util import gpu_available, split_list
from horovod.common.util import num_rank_is_power_2 as check_num_rank_power_of_2
from horovod.tensorflow import _allreduce as _reductions
from horovod.tensorflow import elastic, functions
from horovod.tensorflow._allreduce import *  # noqa: F403
from horovod.tensorflow._allreduce import _allreduce as _allreduce
from horovod.tensorflow._allreduce import _grouped_allreduce as _grouped_allreduce
from horovod.tensorflow._allreduce import _grouped_reducescatter as _grouped_reducescatter
from horovod.tensorflow._allreduce import _reducescatter as _reducescatter
from horovod.tensorflow._gradient_reduction import (
    _make_allreduce_grads_fn as _make_allreduce_grads_fn,
)
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.functions import *  # type: ignore[assignment] # noqa: F403
from horovod.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
from horovod.tensorflow.mpi_ops import _check_has_gpu as _check_has_gpu
from horovod.tensorflow.mpi_ops import (
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
from horovod.tensorflow.optimizer import (
    DistributedOptimizer,
)
from horovod.tensorflow.optimizer import (
    _DistributedAdasumOptimizer as _DistributedAdasumOptimizer,
)
from horovod.tensorflow.optimizer import _DistributedOptimizer as _DistributedOptimizer
from horovod.tensorflow.optimizer import _LegacyOptimizer as _LegacyOptimizer
from horovod.tensorflow.tape import (
    DistributedGradientTape,
    PartialDistributedGradientTape,
)
from horovod.tensorflow.tape import _DistributedGradientTape as _DistributedGradientTape
from horovod.tensorflow.util import _cache as _cache
from horovod.tensorflow.util import _executing_eagerly as _executing_eagerly
from horovod.tensorflow.util import _make_subgraph as _make_subgraph
from horovod.tensorflow.util import refs_to_vars, vars_to_refs

if TYPE_CHECKING:
    from horovod.tensorflow.sync_batch_norm import SyncBatchNormalization

__all__ = [
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "LocalGradientAggregationHelper",
    "PartialDistributedGradientTape",
    "SyncBatchNormalization",
    "allgather",
    "alltoall",
    "broadcast",
    "broadcast_",
    "check_num_rank_power_of_2",
    "elastic",
    "gpu_available",
    "grouped_allgather",
    "handle_average_backwards_compatibility",
    "is_homogeneous",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "refs_to_vars",
    "size_op",
    "split_list",
    "vars_to_refs",
]
__all__ += _api.__all__
# TensorFlow's operations have no handles to poll. The other three names are replaced by functions for TensorFlow.
__all__.remove("poll")
__all__.remove("join")
__all__.remove("allgather_object")
__all__.remove("broadcast_object")
__all__ += ["join"]
__all__ += functions.__all__
__all__ += _reductions.__all__


def __getattr__(name: str) -> Any:
    # The layer's base class is in Keras, whose import takes seconds.
    if name == "SyncBatchNormalization":
        from horovod.tensorflow import sync_batch_norm

        try:
            return sync_batch_norm.SyncBatchNormalization
        except AttributeError as error:
            _absent.raise_unavailable(str(error))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
