"""Data-parallel training with `tf.keras`: `import horovod.tensorflow.keras as hvd`.

`tf.keras` is Keras 3, or Keras 2 with `TF_USE_LEGACY_KERAS=1`. Optimizers of either generation are taken.
"""

from typing import Any

import tensorflow as tf

import horovod._keras as _impl
from horovod._keras._old_keywords import accept_old_keywords
from horovod.common._ops import Average, Sum
from horovod.common._optimizer_settings import groups_given
from horovod.common.api import (
    Checkpoint,
    ProcessSet,
    add_process_set,
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
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stats,
    step,
    stop_timeline,
)
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.keras import callbacks, elastic

_keras: Any = tf.keras
accept_old_keywords(_keras)

__all__ = [
    "Average",
    "Checkpoint",
    "Compression",
    "DistributedOptimizer",
    "ProcessSet",
    "Sum",
    "add_process_set",
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
    "remove_process_set",
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
    return _impl.nccl_built(_keras)


def DistributedOptimizer(
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
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """An optimizer like the one given that reduces gradients over the ranks before each step.

    It is of a subclass of the given one's class, under the same name. Clipping, weight decay and moving averages act on
    the reduced gradients. Steps, momentum and the like of the given optimizer are taken over only if its class or
    its schedule is not Keras's own. Gradients that a script computes by itself are reduced
    by `apply_gradients` with Keras 3; with Keras 2 by `DistributedGradientTape`.

    Parameters
    ----------
    optimizer
        Of Keras 3, or of Keras 2 (`tf_keras`), new or legacy.
    name
        Pairs the operations across ranks; by default `DistributedOptimizer`.
    device_dense, device_sparse
        Devices for the operations, with Keras 2.
    compression
        `Compression.none` or `Compression.fp16`, or a class with the same functions.
    sparse_as_dense
        Whether sparse gradients (of embeddings) are made dense before they travel.
    gradient_predivide_factor
        The sum is divided by it before, and by the rest of the number of ranks after the reduction.
    op
        `Average` or `Sum`.
    backward_passes_per_step
        Batches whose gradients are added up before they travel and a step is made.
    average_aggregated_gradients
        Whether the sum over these batches is divided by their number.
    num_groups
        The older form of an integer as `groups`.
    groups
        Which gradients travel in one operation: a number of groups, or a list of lists of variables.
    process_set
        The ranks that take part; others make their steps alone.
    scale_local_gradients
        Whether gradients of variables given to `register_local_var` are divided by the number of ranks.

    Raises
    ------
    ValueError
        An argument that cannot be.

    Examples
    --------
    >>> optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.1 * hvd.size()))
    >>> model.compile(optimizer=optimizer, loss="mse")
    """
    return _impl.create_distributed_optimizer(
        _keras,
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
        groups_given(groups, num_groups),
        process_set,
        scale_local_gradients,
    )


def broadcast_global_variables(root_rank: int) -> None:
    """Broadcast the global variables of a graph of TensorFlow 1 style.

    Raises
    ------
    RuntimeError
        TensorFlow runs eagerly: use `callbacks.BroadcastGlobalVariablesCallback`.
    """
    _impl.broadcast_global_variables(_keras, root_rank)


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | str | None = None,
    compression: Any = Compression.none,
) -> Any:
    """Combine a value (array, number, tensor) of every rank; a tensor. `op` supersedes `average`.

    In a compiled step, such as a model's `train_step`, it is a part of the step. On TensorFlow it runs in each step
    only if it is given a tensor or a variable.
    """
    return _impl.allreduce(
        _keras, value, name, average, prescale_factor, postscale_factor, op, compression
    )


def allgather(value: Any, name: str | None = None) -> Any:
    """The values of all ranks one after the other along dimension 0, which may differ between ranks."""
    return _impl.allgather(_keras, value, name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """The root's value on every rank."""
    return _impl.broadcast(_keras, value, root_rank, name)


def reducescatter(value: Any, name: str | None = None, op: int | str = Average) -> Any:
    """Combine the values of all ranks and give each its part of the rows."""
    return _impl.reducescatter(_keras, value, name, op)


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
        _keras, filepath, custom_optimizers, custom_objects, compression, legacy_opts
    )
