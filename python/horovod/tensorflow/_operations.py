"""Functions for the registered operations on TensorFlow's tensors, one for each.

`horovod.tensorflow` adds compression and the support of `tf.IndexedSlices`. In eager execution the operation's type is
its name, `name` has no effect, and a call returns when the operation has ended. In graphs the node's name pairs an
operation across ranks, and operations run concurrently.
"""

import operator
import re
import struct
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import tensorflow as tf

from horovod import _core
from horovod.common._ops import Sum, resolve_op
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.tensorflow import _xla
from horovod.tensorflow._library import LIBRARY
from horovod.tensorflow._parallel_loops import refuse_inside

MPI_LIB: Final = LIBRARY


def _normalize_name(name: str) -> str:
    """Return the name with `_` in place of every character that TensorFlow does not allow in names."""
    return re.sub("[^a-zA-Z0-9_]", "_", name)


def _allreduce(
    tensor: Any,
    name: str | None = None,
    op: int | str = Sum,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Combine one dense tensor of every rank; the result is bitwise the same on all of them.

    Differentiable: the gradient is the same allreduce of the incoming gradient.

    Parameters
    ----------
    tensor
        Any shape; the same shape and dtype on every rank. Any integer or floating dtype, bfloat16, bool.
    name
        Name that pairs the call across ranks in graphs; default a name made from the tensor's name.
    op
        `Average`, `Sum`, `Adasum`, `Min`, `Max` or `Product`.
    prescale_factor, postscale_factor
        64-bit factors by which the tensor is multiplied before and after the reduction.
    ignore_name_scope
        Whether to leave the name scopes out of the name, for ranks whose scopes differ.
    process_set
        The ranks that take part; only members may call.

    Raises
    ------
    tf.errors.InvalidArgumentError
        This process is not a member, the dtype is unsupported, or an operation of the same name is pending.
    tf.errors.FailedPreconditionError
        Horovod is not initialised, or the ranks disagree; the message names the difference.
    tf.errors.UnknownError
        A rank was lost, or the job was shut down.
    tf.errors.AbortedError
        The ranks wait for each other forever.
    """
    return _library().horovod_allreduce(
        tensor,
        name=_graph_name("HorovodAllreduce", name, tensor),
        ignore_name_scope=ignore_name_scope,
        **_attributes(op, prescale_factor, postscale_factor, process_set),
    )


def _grouped_allreduce(
    tensors: Sequence[Any],
    name: str | None = None,
    op: int | str = Sum,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Combine several dense tensors of one dtype as one operation: all succeed or all fail. See `_allreduce`."""
    if not tensors:
        return list(tensors)
    return _library().horovod_grouped_allreduce(  # type: ignore[no-any-return]
        tensors,
        name=_graph_name("HorovodGroupedAllreduce", name, tensors[0], tensors[-1]),
        ignore_name_scope=ignore_name_scope,
        **_attributes(op, prescale_factor, postscale_factor, process_set),
    )


def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Concatenate one tensor of every rank along the first dimension, in the order of ranks.

    Differentiable: the gradient is this rank's rows of the *average* of the incoming gradients. The exact derivative
    would be the sum, but existing scripts expect the average.

    Parameters
    ----------
    tensor
        Tensor of at least one dimension. The first dimension may differ between ranks and be 0; the others and the
        dtype are equal on all ranks.
    name, ignore_name_scope, process_set
        As in `_allreduce`. The errors are the same.
    """
    return _library().horovod_allgather(
        tensor,
        name=_graph_name("HorovodAllgather", name, tensor),
        ignore_name_scope=ignore_name_scope,
        process_set_id=_set_id(process_set),
    )


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Gather several tensors of one dtype as one operation; see `allgather`. Raise ValueError for an empty list."""
    if not tensors:
        raise ValueError("grouped_allgather: expected at least one tensor, got an empty list.")
    return _library().horovod_grouped_allgather(  # type: ignore[no-any-return]
        tensors,
        name=_graph_name("HorovodGroupedAllgather", name, tensors[0], tensors[-1]),
        ignore_name_scope=ignore_name_scope,
        process_set_id=_set_id(process_set),
    )


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the tensor of one rank on all ranks.

    Differentiable: the gradient is the average of the incoming gradients on the root, and zero elsewhere.

    Parameters
    ----------
    tensor
        The same shape and dtype on every rank; any shape.
    root_rank
        The root's rank in the job, also with a process set.
    name, ignore_name_scope, process_set
        As in `_allreduce`. The errors are the same.
    """
    return _library().horovod_broadcast(
        tensor,
        name=_graph_name("HorovodBroadcast", name, tensor),
        root_rank=operator.index(root_rank),  # TensorFlow would truncate a fraction
        ignore_name_scope=ignore_name_scope,
        process_set_id=_set_id(process_set),
    )


def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Assign the values of one rank's variables to the variables of all ranks, and return these values.

    Each variable is read, broadcast and assigned, because custom operations cannot access a variable's memory.

    Parameters
    ----------
    variables
        Either resource variables only, or TF 1's reference variables only.
    root_rank, name, process_set
        As in `broadcast`; an operation's name consists of `name` and the variable's position.

    Raises
    ------
    ValueError
        `variables` contains variables of both kinds.
    """
    variables = list(variables)
    if len({_is_resource(variable) for variable in variables}) > 1:
        raise ValueError(
            "All variables passed to broadcast_() should be of the same kind, resource or reference"
        )
    prefix = name or "HorovodBroadcast"
    assigned = []
    for place, variable in enumerate(variables):
        # The variable's name is not used: it contains layer names, whose counters may differ between ranks.
        value = broadcast(variable, root_rank, name=f"{prefix}_{place}", process_set=process_set)
        update = variable.assign(value)
        if tf.executing_eagerly():
            assigned.append(value)
            continue
        # The returned value depends on the assignment, so that running it in a graph also assigns.
        with tf.control_dependencies([update] if update is not None else [value]):
            assigned.append(tf.identity(value))
    return assigned


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send a part of the rows to each rank, and concatenate the received rows in the order of ranks.

    Differentiable with respect to `tensor`: each gradient row is sent back to the rank that sent the row.

    Parameters
    ----------
    tensor
        Tensor of at least one dimension. All dimensions but the first, and the dtype, are equal on all ranks.
    splits
        Number of rows for each member: one dimension, int32. Without it all members get the same number.
    name, ignore_name_scope, process_set
        As in `_allreduce`. The errors are the same.

    Returns
    -------
    The rows received; with `splits` also the number of rows from each member, int32.
    """
    rows = splits if tf.is_tensor(splits) else tf.convert_to_tensor(_counts(splits), dtype=tf.int32)
    output, received_splits = _library().horovod_alltoall(
        tensor,
        splits=rows,
        name=_graph_name("HorovodAlltoall", name, tensor),
        ignore_name_scope=ignore_name_scope,
        process_set_id=_set_id(process_set),
    )
    return output if splits is None else (output, received_splits)


def _counts(splits: Any) -> Any:
    """Return the checked rows for each rank: TensorFlow would truncate fractions and the bits of NumPy integers."""
    if splits is None:
        return []
    if not isinstance(splits, np.ndarray) and any(map(tf.is_tensor, splits)):
        return splits
    counts = np.asarray(splits)
    if counts.size and (counts.dtype.kind not in "iu" or counts.max() > np.iinfo(np.int32).max):
        raise ValueError(
            f"alltoall expects a 1D list of 32-bit integers as splits, not {splits!r:.200}."
        )
    return counts


def _reducescatter(
    tensor: Any,
    name: str | None = None,
    op: int | str = Sum,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Combine one tensor of every rank, and return this rank's part of the result's rows.

    Of `d` rows rank `r` of `n` gets `d // n + (r < d % n)`. Differentiable: the incoming gradients are gathered, and
    for `Sum` multiplied by the number of ranks.

    Parameters
    ----------
    tensor
        Tensor of at least one dimension; the same shape and dtype on every rank.
    op
        `Sum` or `Average`.
    name, ignore_name_scope, process_set, prescale_factor, postscale_factor
        As in `_allreduce`. The errors are the same.
    """
    return _library().horovod_reducescatter(
        tensor,
        name=_graph_name("HorovodReducescatter", name, tensor),
        ignore_name_scope=ignore_name_scope,
        **_attributes(op, prescale_factor, postscale_factor, process_set),
    )


def _grouped_reducescatter(
    tensors: Sequence[Any],
    name: str | None = None,
    op: int | str = Sum,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """Reduce and scatter several tensors of one dtype as one operation; see `_reducescatter`."""
    if not tensors:
        return list(tensors)
    return _library().horovod_grouped_reducescatter(  # type: ignore[no-any-return]
        tensors,
        name=_graph_name("HorovodGroupedReducescatter", name, tensors[0], tensors[-1]),
        ignore_name_scope=ignore_name_scope,
        **_attributes(op, prescale_factor, postscale_factor, process_set),
    )


def join() -> Any:
    """Wait until all ranks have joined; until then contribute zeros to the allreduces of the other ranks.

    Returns
    -------
    int32 scalar: the rank that joined last.
    """
    return _library().horovod_join()


def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return the number of members of a process set when it is run, as an int32 scalar.

    Raise FailedPreconditionError before `init`, and InvalidArgumentError if there is no such set.
    """
    return _library().horovod_size(process_set_id=process_set_id, name=name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return whether this process is a member when the operation runs, as an int32 scalar: 1 or 0; -3: no such set."""
    return _library().horovod_process_set_included(process_set_id=process_set_id, name=name)


def local_size_op(name: str | None = None) -> Any:
    """Return the number of the job's processes on this host when it is run, as an int32 scalar."""
    return _library().horovod_local_size(name=name)


def rank_op(name: str | None = None) -> Any:
    """Return this process's rank in the job when it is run, as an int32 scalar."""
    return _library().horovod_rank(name=name)


def local_rank_op(name: str | None = None) -> Any:
    """Return this process's rank among those of its host when it is run, as an int32 scalar."""
    return _library().horovod_local_rank(name=name)


def _library() -> Any:
    """Return the generated functions, or their replacements while a function is traced for XLA."""
    return _xla.LIBRARY if _xla.is_compiling() else MPI_LIB


def _graph_name(kind: str, name: str | None, *tensors: Any) -> str | None:
    """Return the name of an operation's node: `name`, or a name made from the names of the tensors.

    Raises
    ------
    NotImplementedError
        The operation would be part of a parallel loop.
    TypeError
        `name` is not a string.
    """
    refuse_inside(kind)
    if not isinstance(name, str | None):
        raise TypeError(f"An operation's name is a string, not {name!r}.")
    if name is not None or tf.executing_eagerly():
        return name
    names = [getattr(tensor, "name", None) for tensor in tensors]
    known = [_normalize_name(part) for part in names if isinstance(part, str)]
    return "_".join([kind, *known])


def _attributes(
    op: int | str, prescale_factor: float, postscale_factor: float, process_set: ProcessSet
) -> dict[str, Any]:
    """Return the attributes of a reduction. Float attributes have 32 bits, so integers pass the factors' 64 bits."""
    prescale, postscale = float(prescale_factor), float(postscale_factor)
    return {
        "process_set_id": _set_id(process_set),
        "reduce_op": resolve_op(op, None),
        "prescale_factor": prescale,
        "postscale_factor": postscale,
        "prescale_bits": _bits(prescale),
        "postscale_bits": _bits(postscale),
    }


def _bits(factor: float) -> int:
    """Return the bits of a 64-bit factor as an integer; 0 (no bits) for the factor 1, which 32 bits represent."""
    if factor == 1.0:
        return 0
    (bits,) = struct.unpack("<q", struct.pack("<d", factor))
    return int(bits)


def _set_id(process_set: ProcessSet) -> int:
    """Return the id of a registered process set; raise ValueError if the set is not registered."""
    return _core.registered_process_set(process_set.process_set_id)


def _is_resource(variable: Any) -> bool:
    dtype = getattr(variable, "dtype", None)
    return not isinstance(dtype, tf.DType) or dtype == dtype.base_dtype
