"""Every operation on TensorFlow's tensors as it is registered.

The functions here do not average in Python, compress or look into `tf.IndexedSlices`; `horovod.tensorflow` does. In
eager execution an operation's name is its type, whatever `name` says, and a call returns when it has ended. In graphs
the node's name pairs it across ranks, and operations run side by side.
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
    """Return the name with every character that TensorFlow does not take in names replaced by `_`."""
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
        Pairs the call across ranks in graphs; by default it follows from the tensor's name.
    op
        `Average`, `Sum`, `Adasum`, `Min`, `Max` or `Product`.
    prescale_factor, postscale_factor
        Multiplied before and after, as 64-bit numbers.
    ignore_name_scope
        Leave the name scopes out of the name, where those of the ranks differ.
    process_set
        The ranks that take part; only members may call.

    Raises
    ------
    tf.errors.InvalidArgumentError
        Not a member, an unsupported dtype, or an operation of the same name is under way.
    tf.errors.FailedPreconditionError
        Horovod is not initialised, or the ranks disagree: the message says in what.
    tf.errors.UnknownError
        A rank was lost, or the job was shut down.
    tf.errors.AbortedError
        The ranks wait for each other for ever.
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
    """Combine several dense tensors of one dtype as one operation, all or none of them. Otherwise as `_allreduce`."""
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

    Differentiable: the gradient is this rank's rows of the *average* of the incoming gradients, as scripts expect it (a
    sum would be the derivative).

    Parameters
    ----------
    tensor
        At least one dimension; the first may differ between ranks and be 0, the others and the dtype are the same.
    name, ignore_name_scope, process_set
        As in `_allreduce`, and so are the errors.
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
    """Gather several tensors of one dtype as one operation; each as `allgather`. An empty list is a ValueError."""
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
    """Return the tensor of one rank on all of them.

    Differentiable: the gradient is the average of the incoming gradients on the root, and zero elsewhere.

    Parameters
    ----------
    tensor
        The same shape and dtype on every rank; any shape.
    root_rank
        Its rank in the job, also with a process set.
    name, ignore_name_scope, process_set
        As in `_allreduce`, and so are the errors.
    """
    return _library().horovod_broadcast(
        tensor,
        name=_graph_name("HorovodBroadcast", name, tensor),
        root_rank=operator.index(root_rank),  # TensorFlow would cut a fraction off
        ignore_name_scope=ignore_name_scope,
        process_set_id=_set_id(process_set),
    )


def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Give variables the values that they have on one rank, and return these values.

    TensorFlow lets no operation from outside reach a variable's memory: each is read, broadcast and assigned.

    Parameters
    ----------
    variables
        All of them resource variables, or all of them TF 1's reference variables.
    root_rank, name, process_set
        As in `broadcast`; the operations' names are `name` and the variable's place.

    Raises
    ------
    ValueError
        Variables of both kinds.
    """
    variables = list(variables)
    if len({_is_resource(variable) for variable in variables}) > 1:
        raise ValueError(
            "All variables passed to broadcast_() should be of the same kind, resource or reference"
        )
    prefix = name or "HorovodBroadcast"
    assigned = []
    for place, variable in enumerate(variables):
        # Not the variable's name, which contains names of layers, which count all layers of the process.
        value = broadcast(variable, root_rank, name=f"{prefix}_{place}", process_set=process_set)
        update = variable.assign(value)
        if tf.executing_eagerly():
            assigned.append(value)
            continue
        # In a function the assignment is an operation of it, in a graph the read follows from it.
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
    """Send a part of the rows to each rank, and concatenate what is received, in the order of ranks.

    Differentiable with respect to `tensor`: the gradients travel back.

    Parameters
    ----------
    tensor
        At least one dimension; the dimensions but the first and the dtype are the same on every rank.
    splits
        How many rows each member gets: one dimension, int32. Without it all get as many.
    name, ignore_name_scope, process_set
        As in `_allreduce`, and so are the errors.

    Returns
    -------
    The rows received; with `splits` also how many came from each member, int32.
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
    """Rows for each rank, checked: TensorFlow would cut off fractions, and bits of NumPy's numbers."""
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
    """Combine one tensor of every rank, and give each rank a part of the result's rows.

    Of `d` rows rank `r` of `n` gets `d // n + (r < d % n)`. Differentiable: the incoming gradients are gathered; with
    `Sum` they are multiplied by the number of ranks.

    Parameters
    ----------
    tensor
        At least one dimension; the same shape and dtype on every rank.
    op
        `Sum` or `Average`.
    name, ignore_name_scope, process_set, prescale_factor, postscale_factor
        As in `_allreduce`, and so are the errors.
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
    """Reduce and scatter several tensors of one dtype as one operation; each as `_reducescatter`."""
    if not tensors:
        return list(tensors)
    return _library().horovod_grouped_reducescatter(  # type: ignore[no-any-return]
        tensors,
        name=_graph_name("HorovodGroupedReducescatter", name, tensors[0], tensors[-1]),
        ignore_name_scope=ignore_name_scope,
        **_attributes(op, prescale_factor, postscale_factor, process_set),
    )


def join() -> Any:
    """Wait until all ranks have joined, taking part in their allreduces with zeros meanwhile.

    Returns
    -------
    int32 scalar: the rank that joined last.
    """
    return _library().horovod_join()


def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return the number of members of a process set when it is run, as an int32 scalar.

    FailedPreconditionError before `init`, as all queries below; InvalidArgumentError if there is no such set.
    """
    return _library().horovod_size(process_set_id=process_set_id, name=name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return whether this process is a member when it is run, as an int32 scalar: 1, 0, or -3 without such a set."""
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
    """The generated functions; what takes their place in functions that XLA compiles."""
    return _xla.LIBRARY if _xla.is_compiling() else MPI_LIB


def _graph_name(kind: str, name: str | None, *tensors: Any) -> str | None:
    """The name of an operation's node; without one it follows from the names of the first and the last tensor.

    Raises
    ------
    NotImplementedError
        The operation would be part of a parallel loop.
    TypeError
        The name is no string.
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
    """Attributes of a reduction. TensorFlow's numbers have 32 bits, so the factors' bits go beside them."""
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
    """The bits of a 64-bit number as an integer; 0, which stands for none, where 32 bits are certainly enough."""
    if factor == 1.0:
        return 0
    (bits,) = struct.unpack("<q", struct.pack("<d", factor))
    return int(bits)


def _set_id(process_set: ProcessSet) -> int:
    """The number of a registered process set; ValueError for another."""
    return _core.registered_process_set(process_set.process_set_id)


def _is_resource(variable: Any) -> bool:
    dtype = getattr(variable, "dtype", None)
    return not isinstance(dtype, tf.DType) or dtype == dtype.base_dtype
