"""Data-parallel training with Keras 3 on TensorFlow, PyTorch or JAX: `import horovod.keras as hvd`.

The backend is the one that Keras runs with (`KERAS_BACKEND`). Optimizers of Keras 2 (`tf_keras`) are taken, too.
"""

import importlib.util
import sys

if importlib.util.find_spec("keras") is None:
    raise ModuleNotFoundError(
        f"horovod.keras needs Keras, which is not installed for {sys.executable}: pip install keras",
        name="keras",
    )

from typing import Any

import keras

import horovod._keras as _impl
from horovod._keras._old_keywords import accept_old_keywords
from horovod._keras.compression import Compression
from horovod.common._ops import Adasum, Average, Sum
from horovod.common._optimizer_settings import groups_given
from horovod.common.api import (
    Checkpoint,
    average_metrics,
    ccl_built,
    check_finite,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_gradient_norm,
    global_process_set,
    gloo_built,
    gloo_enabled,
    init,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    on_rank_zero,
    phase,
    rank,
    rank_logger,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stats,
    step,
    stop_timeline,
)
from horovod.common.process_sets import ProcessSet
from horovod.keras import callbacks, elastic

accept_old_keywords(keras)

__all__ = [
    "Adasum",
    "Average",
    "Checkpoint",
    "Compression",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "Sum",
    "allgather",
    "allreduce",
    "average_metrics",
    "broadcast",
    "broadcast_global_variables",
    "callbacks",
    "ccl_built",
    "check_finite",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_gradient_norm",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "on_rank_zero",
    "phase",
    "rank",
    "rank_logger",
    "reducescatter",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stats",
    "step",
    "stop_timeline",
]


def nccl_built() -> int:
    """NCCL's version code if operations of Keras' backend can use it, which are those of PyTorch; else 0."""
    return _impl.nccl_built(keras)


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int | str = Average,
    num_groups: int = 0,
    groups: Any = None,
) -> Any:
    """An optimizer like the one given that reduces gradients over the ranks before each step.

    It is of a subclass of the given one's class, under the same name. Clipping, weight decay and moving averages act on
    the reduced gradients. Steps, momentum and the like of the given optimizer are taken over only if its class or
    its schedule is not Keras's own.

    Parameters
    ----------
    optimizer
        Of Keras 3, or of Keras 2 (`tf_keras`).
    name
        Pairs the operations across ranks; by default `DistributedOptimizer`.
    device_dense, device_sparse
        Accepted for older scripts.
    compression
        `Compression.none` or `Compression.fp16`, or a class with the same functions.
    sparse_as_dense
        Whether sparse gradients (of TensorFlow's embeddings) are made dense before they travel.
    gradient_predivide_factor
        The sum is divided by it before, and by the rest of the number of ranks after the reduction.
    op
        `Average` or `Sum`.
    num_groups
        The older form of an integer as `groups`.
    groups
        By default all gradients of a step travel in one operation. A number: in so many; a list of lists of variables:
        each list in one.

    Raises
    ------
    ValueError
        An argument that cannot be, or the backend computes no gradients.

    Examples
    --------
    >>> optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1 * hvd.size()))
    >>> model.compile(optimizer=optimizer, loss="mse")
    """
    return _impl.create_distributed_optimizer(
        keras,
        optimizer,
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        groups=groups_given(groups, num_groups),
    )


def PartialDistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int | str = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """As `DistributedOptimizer`, with layers whose gradients stay on each rank.

    Parameters
    ----------
    backward_passes_per_step
        Batches whose gradients are added up before they travel and a step is made.
    average_aggregated_gradients
        Whether the sum over these batches is divided by their number.
    process_set
        The ranks that take part; others make their steps alone.
    local_layers
        A layer, or a collection of layers, which must be built.
    scale_local_gradients
        Whether the gradients of local layers are divided by the number of ranks.

    Raises
    ------
    ValueError
        As `DistributedOptimizer`, or a local layer is none.
    """
    made = _impl.create_distributed_optimizer(
        keras,
        optimizer,
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        backward_passes_per_step,
        average_aggregated_gradients,
        groups,
        process_set,
        scale_local_gradients,
    )
    if local_layers is not None:
        _impl.register_local_layers(made, local_layers)
    return made


def broadcast_global_variables(root_rank: int) -> None:
    """Not with Keras 3, which has no global variables: use `callbacks.BroadcastGlobalVariablesCallback`.

    Raises
    ------
    RuntimeError
        Always, but in a graph of TensorFlow 1 style.
    """
    _impl.broadcast_global_variables(keras, root_rank)


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = True,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | str | None = None,
    compression: Any = Compression.none,
) -> Any:
    """Combine a value (array, number, tensor) of every rank; a tensor of the backend. `op` supersedes `average`.

    In a compiled step, such as a model's `train_step`, it is a part of the step. On TensorFlow it runs in each step
    only if it is given a tensor or a variable.
    """
    return _impl.allreduce(
        keras, value, name, average, prescale_factor, postscale_factor, op, compression
    )


def allgather(value: Any, name: str | None = None) -> Any:
    """The values of all ranks one after the other along dimension 0, which may differ between ranks."""
    return _impl.allgather(keras, value, name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """The root's value on every rank."""
    return _impl.broadcast(keras, value, root_rank, name)


def reducescatter(value: Any, name: str | None = None, op: int | str = Average) -> Any:
    """Combine the values of all ranks and give each its part of the rows."""
    return _impl.reducescatter(keras, value, name, op)


def load_model(
    filepath: Any,
    custom_optimizers: Any = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Load a model that was saved, with its optimizer wrapped, state and all.

    Parameters
    ----------
    filepath
        File that `model.save` has written, with this package or without.
    custom_optimizers
        Classes of optimizers that are not Keras's own.
    custom_objects
        As of `keras.models.load_model`.
    compression
        As of `DistributedOptimizer`.
    legacy_opts
        Only for Keras 2: whether the optimizer is one of the legacy classes.
    """
    return _impl.load_model(
        keras, filepath, custom_optimizers, custom_objects, compression, legacy_opts
    )
