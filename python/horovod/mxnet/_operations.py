"""Every collective operation of `horovod.mxnet`.

Allreduce and broadcast run in MXNet's engine: they return at once, and errors are raised where the result is read. The
others, whose results have sizes that only the ranks together know, wait. None is differentiable: inside
`autograd.record()` a result is a constant.
"""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import mxnet as mx
from mxnet.base import MXNetError

from horovod import _core
from horovod.common import _waiting
from horovod.common._collectives import RowCollectives
from horovod.common._operations import checked_root
from horovod.common._ops import Adasum, Average, Sum, resolve_op
from horovod.common._reduction import Reduction
from horovod.common.basics import basics
from horovod.common.exceptions import HorovodInternalError
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.mxnet._arrays import MxnetArrays, NDArray, checked, empty, on_gpu
from horovod.mxnet._engine import drain, push

__all__ = [
    "allgather",
    "allreduce",
    "allreduce_",
    "alltoall",
    "broadcast",
    "broadcast_",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_reducescatter",
    "reducescatter",
]

_rows: RowCollectives[NDArray] = RowCollectives(MxnetArrays(), "horovod_")

# Count the unnamed operations of all kinds: members of a set must start them in the same order.
_unnamed: WeakKeyDictionary[ProcessSet, Iterator[int]] = WeakKeyDictionary()


def _named(name: Any, process_set: ProcessSet) -> str:
    if isinstance(name, str) and name:
        return name
    return f"noname.{next(_unnamed.setdefault(process_set, itertools.count(1)))}"


def _reduced(
    tensors: Sequence[NDArray],
    in_place: bool,
    name: str | None,
    priority: int,
    reduction: Reduction,
) -> Sequence[NDArray]:
    if reduction.op == Adasum:
        raise AssertionError("horovod.mxnet does not support op Adasum.")
    if not tensors:
        return tensors
    prefix = "horovod_allreduce" if len(tensors) == 1 else "horovod_grouped_allreduce"
    staged = any(on_gpu(checked(tensor)) for tensor in tensors)
    inputs, outputs = tensors, None
    if staged:
        inputs = [tensor.copyto(mx.cpu()) for tensor in tensors]
    elif not in_place:
        outputs = [empty(tensor.shape, tensor.ctx, tensor.dtype) for tensor in tensors]
    push(
        _core.ALLREDUCE,
        prefix,
        _named(name, reduction.process_set),
        inputs,
        outputs,
        reduction,
        priority,
    )
    if not in_place:
        return outputs or [
            host.as_in_context(tensor.ctx) for host, tensor in zip(inputs, tensors, strict=True)
        ]
    if staged:
        for host, tensor in zip(inputs, tensors, strict=True):
            host.copyto(tensor)
    return tensors


def allreduce(
    tensor: NDArray,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> NDArray:
    """Combine one array of every rank into a new one, of the same shape, type and context.

    Parameters
    ----------
    tensor
        Dense; the same shape and dtype on every rank. Not modified.
    average
        Deprecated: True is `op=Average`, False `op=Sum`.
    name
        Pairs the call across ranks. Without one, all ranks must issue their unnamed calls in the same order.
    priority
        Of the operations that are ready, MXNet's engine starts those with higher numbers first.
    prescale_factor, postscale_factor
        Factors before and after the reduction.
    process_set
        The ranks that take part.
    op
        `Average` (default), `Sum`, `Min`, `Max` or `Product`.

    Raises
    ------
    ValueError
        `op` and `average` are both given.
    AssertionError
        No dense array of MXNet's; `op` is Adasum.
    MXNetError
        Where the result is read: ranks disagree, a rank was lost, the dtype cannot be combined like that, Horovod
        is not initialised.
    """
    op = resolve_op(op, average)
    reduction = Reduction(op, prescale_factor, postscale_factor, process_set)
    return _reduced([tensor], False, name, priority, reduction)[0]


def allreduce_(
    tensor: NDArray,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> NDArray:
    """Combine one array of every rank in place and return it; arguments and errors as in `allreduce`."""
    op = resolve_op(op, average)
    reduction = Reduction(op, prescale_factor, postscale_factor, process_set)
    return _reduced([tensor], True, name, priority, reduction)[0]


def grouped_allreduce(
    tensors: Sequence[NDArray],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> Sequence[NDArray]:
    """Combine several arrays as one operation, all or none, into a list of new ones; otherwise as `allreduce`."""
    op = resolve_op(op, average)
    reduction = Reduction(op, prescale_factor, postscale_factor, process_set)
    return _reduced(tensors, False, name, priority, reduction)


def grouped_allreduce_(
    tensors: Sequence[NDArray],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> Sequence[NDArray]:
    """Combine several arrays in place as one operation, all or none, and return the list; otherwise as `allreduce`."""
    op = resolve_op(op, average)
    reduction = Reduction(op, prescale_factor, postscale_factor, process_set)
    return _reduced(tensors, True, name, priority, reduction)


def broadcast(
    tensor: NDArray,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> NDArray:
    """Return the array of the root, a global rank, as a new one on every rank; otherwise as `broadcast_`."""
    checked(tensor)
    target = empty(tensor.shape, tensor.ctx, tensor.dtype)
    if basics.is_initialized() and basics.rank() == root_rank:
        tensor.copyto(target)
    return broadcast_(target, root_rank, name, priority, process_set)


def broadcast_(
    tensor: NDArray,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> NDArray:
    """Replace the values of an array by those of the root, a global rank, and return it.

    Shape and dtype are the same on every rank; `name`, `priority`, `process_set` and errors as in `allreduce`.
    """
    root_rank = checked_root(root_rank)
    host = tensor.copyto(mx.cpu()) if on_gpu(checked(tensor)) else tensor
    prefix, name = "horovod_broadcast", _named(name, process_set)
    members = Reduction(Sum, process_set=process_set)
    push(_core.BROADCAST, prefix, name, [host], None, members, priority, root_rank=root_rank)
    if host is not tensor:
        host.copyto(tensor)
    return tensor


@contextmanager
def _core_errors(process_set: ProcessSet) -> Iterator[None]:
    """Raise errors of the core as MXNetError, as where arrays are read; ValueError if the set is not registered."""
    _core.registered_process_set(process_set.process_set_id)
    try:
        yield
    except (HorovodInternalError, ValueError) as error:
        raise MXNetError(str(error)) from error


def allgather(
    tensor: NDArray,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> NDArray:
    """Return the arrays of all ranks one after the other along dimension 0, which may differ between ranks; waits.

    AssertionError for what is no dense array of MXNet's, MXNetError as in `allreduce`.
    """
    del priority
    with _core_errors(process_set):
        return _rows.allgather(tensor, _named(name, process_set), process_set)


def grouped_allgather(
    tensors: Sequence[NDArray],
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Sequence[NDArray]:
    """Gather several arrays as one operation, all or none, into a list; otherwise as `allgather`."""
    del priority
    if not tensors:
        return tensors
    with _core_errors(process_set):
        return list(_rows.grouped_allgather(tensors, _named(name, process_set), process_set))


def alltoall(
    tensor: NDArray,
    splits: Any = None,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> NDArray | tuple[NDArray, NDArray]:
    """Send rows to every rank and return those received; waits.

    `splits`, integers, says how many rows go to each rank, without it as many to each. With it a second result says how
    many came from each, in 32 bits. Errors as in `allgather`.
    """
    del priority
    with _core_errors(process_set):
        return _rows.alltoall(tensor, splits, _named(name, process_set), process_set)


def reducescatter(
    tensor: NDArray,
    op: int | str = Average,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> NDArray:
    """Combine the arrays of all ranks and return this rank's part of the rows, the first ranks' longer by one; waits.

    AssertionError unless `op` is Average or Sum, ValueError for an array without dimensions; otherwise as `allgather`.
    """
    del priority
    _check_scattering([tensor], op, "reducescatter")
    scales = (prescale_factor, postscale_factor)
    with _core_errors(process_set):
        return _rows.reducescatter(tensor, _named(name, process_set), op, process_set, *scales)


def grouped_reducescatter(
    tensors: Sequence[NDArray],
    op: int | str = Average,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Sequence[NDArray]:
    """Reduce and scatter several arrays as one operation, all or none; otherwise as `reducescatter`."""
    del priority
    _check_scattering(tensors, op, "groued_reducescatter")  # the text that scripts know
    if not tensors:
        return tensors
    scales = (prescale_factor, postscale_factor)
    with _core_errors(process_set):
        return list(
            _rows.grouped_reducescatter(
                tensors, _named(name, process_set), op, process_set, *scales
            )
        )


def _check_scattering(tensors: Sequence[NDArray], op: int | str, what: str) -> None:
    if resolve_op(op, None) not in (Average, Sum):
        raise AssertionError(f"{what} supports op Average and Sum only, not {op!r}.")
    if any(checked(tensor).shape == () for tensor in tensors):
        raise ValueError(f"{what} does not support scalar inputs")


def join(device: int = -1) -> int:
    """Say that this rank has no more data, and wait until every rank said so; see `horovod.torch`'s.

    Operations pushed into MXNet's engine before take part first.
    """
    drain()
    return _waiting.join(device)
