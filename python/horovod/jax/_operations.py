"""The collectives on arrays and pytrees, differentiable, inside and outside of traced programs."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from horovod.common._collectives import require_members
from horovod.common._operations import checked_root
from horovod.common._ops import Average, Sum, resolve_op
from horovod.common._reduction import Reduction
from horovod.common.basics import basics
from horovod.common.exceptions import HorovodInternalError
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.jax import _calls, _names
from horovod.jax._calls import Arrays, Options

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "reducescatter",
]


def allreduce(
    tensor: Any,
    *,
    op: int | str | None = None,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Combine an array, or all arrays of a pytree, with those of the other ranks; all ranks get the result.

    Differentiable (in reverse mode): the gradient is combined in the same way. Under `vmap` the batch is combined at
    once.

    Parameters
    ----------
    tensor
        An array, a number, or a pytree of such, which is one grouped operation. Shapes and dtypes are the same on every
        rank. Integers, floats, float16, bfloat16, bool (but for Average), complex (Sum, Average).
    op
        `hvd.Average` (default), `Sum`, `Adasum`, `Min`, `Max`, `Product`, or such a name.
    name
        Pairs the call across ranks. In a traced program the default is made of the file's name and the line of the
        call, and a number from the line's second call; outside, calls are numbered.
    prescale_factor, postscale_factor
        Multiply the operands, and the result.
    process_set
        The ranks that take part.

    Raises
    ------
    ValueError
        Wrong arguments on this rank; nothing was sent. In a compiled program the same mistakes, as far as only the core
        finds them, are a `JaxRuntimeError`.
    HorovodInternalError
        Ranks disagree (the message names the array and both values) or a rank was lost. A compiled program raises
        `jax.errors.JaxRuntimeError` with the same message.

    Examples
    --------
    >>> loss = hvd.allreduce(loss)
    >>> grads = jax.jit(lambda grads: hvd.allreduce(grads, op=hvd.Sum))(grads)
    """
    reduction = Reduction(resolve_op(op, None), prescale_factor, postscale_factor, process_set)
    options = _reducing(name, reduction)
    return _on_tree(_allreduce, options, tensor)


def grouped_allreduce(
    tensors: Sequence[Any],
    *,
    op: int | str | None = None,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Combine several arrays as one operation, all or none, and return the list of results; else as `allreduce`."""
    reduction = Reduction(resolve_op(op, None), prescale_factor, postscale_factor, process_set)
    options = _reducing(name, reduction)
    return _on_list(_allreduce, options, tensors)


def broadcast(
    tensor: Any,
    root_rank: int,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the root's array, or pytree of arrays, on every rank.

    Differentiable: the root's gradient is the *average* of the gradients, as in the other frameworks' modules (a sum
    would be the derivative), the others' is zero.

    Parameters
    ----------
    tensor
        An array, a number, or a pytree of such; shapes and dtypes are the root's on every rank.
    root_rank
        Global rank of the root, a Python integer.
    name, process_set
        As in `allreduce`, which also tells the errors.
    """
    return _on_tree(_broadcast, _options(process_set, name, root=checked_root(root_rank)), tensor)


def allgather(
    tensor: Any, *, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the arrays of all ranks one after the other along dimension 0.

    Differentiable: the gradient is this rank's part of the *average* of the gradients, as in the other frameworks'
    modules.

    Parameters
    ----------
    tensor
        An array of at least one dimension, or a pytree of such. Dimensions but the first are the same on every rank.
        The first may differ outside of traced programs only: inside, where shapes are fixed, every rank must
        bring equally many rows, which is checked when the program runs.
    name, process_set
        As in `allreduce`, which also tells the errors.
    """
    return _on_tree(_allgather, _options(process_set, name), tensor)


def grouped_allgather(
    tensors: Sequence[Any],
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Gather several arrays as one operation, all or none, and return the list of results; else as `allgather`."""
    return _on_list(_allgather, _options(process_set, name), tensors)


def reducescatter(
    tensor: Any,
    *,
    op: int | str = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Combine arrays, or pytrees of arrays, of all ranks and return this rank's share of the rows.

    Differentiable: the gradient is the concatenation of the shares' gradients, for `Sum` times the number of ranks, as
    in the other frameworks' modules.

    Parameters
    ----------
    tensor
        An array of at least one dimension, or a pytree of such; shapes and dtypes are the same on every rank. Inside
        traced programs dimension 0 must be a multiple of the number of ranks; outside, the first ranks get a row more.
    op
        `hvd.Average` or `hvd.Sum`.
    name, prescale_factor, postscale_factor, process_set
        As in `allreduce`, which also tells the errors.
    """
    reduction = Reduction(_scattering(op), prescale_factor, postscale_factor, process_set)
    options = _reducing(name, reduction)
    return _on_tree(_reducescatter, options, tensor)


def grouped_reducescatter(
    tensors: Sequence[Any],
    *,
    op: int | str = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Reduce and scatter several arrays as one operation, and return the list of shares; else as `reducescatter`."""
    reduction = Reduction(_scattering(op), prescale_factor, postscale_factor, process_set)
    options = _reducing(name, reduction)
    return _on_list(_reducescatter, options, tensors)


def alltoall(
    tensor: Any,
    splits: Any = None,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows to every rank and return those received, ordered by sender.

    Differentiable where splits are even: the gradient's rows travel back.

    Parameters
    ----------
    tensor
        An array of at least one dimension. Inside traced programs dimension 0 is a multiple of the number of ranks, and
        the same on all.
    splits
        Rows for each rank; None: as many for each. Only outside of traced programs; the result is a pair then, with the
        rows received from each rank (int32).
    name, process_set
        As in `allreduce`, which also tells the errors.
    """
    if splits is None:
        options = _named(_options(process_set, name), (tensor,))
        return _alltoall(options, (tensor,))[0]
    if any(isinstance(value, jax.core.Tracer) for value in (tensor, splits)):
        raise ValueError(
            "alltoall with splits has results whose sizes are known late, which compiled programs, and gradients, "
            "cannot have: call it outside of jit, grad and vmap, or without splits, with as many rows for each rank."
        )
    return _calls.alltoall_at_once(tensor, splits, name, process_set)


# ---- derivatives -----------------------------------------------------------------------------------------------------

# A function of this kind sees values outside of traced programs, and tracers inside, also for constants.
_Collective = Callable[[Options, Arrays], Arrays]


@jax.tree_util.register_static
class _Rows(tuple[int, ...]):
    """Dimension 0 of the operands that have gradients."""


_Gradient = Callable[[Options, _Rows, Arrays], Arrays]


def _differentiable(kind: _calls.Kind, gradient: _Gradient) -> _Collective:
    """A collective of this kind, and what makes operands' gradients of results'."""

    @partial(jax.custom_vjp, nondiff_argnums=(0,))
    def collective(options: Options, operands: Arrays) -> Arrays:
        return _calls.call(kind, options, operands)

    def forward(options: Options, operands: Arrays) -> tuple[Arrays, _Rows]:
        shapes = [jnp.shape(operand) for operand in operands]
        return collective(options, operands), _Rows(shape[0] if shape else 1 for shape in shapes)

    def backward(options: Options, rows: _Rows, gradients: Arrays) -> tuple[Arrays]:
        # Integers have gradients without values, which nobody sends.
        real = [i for i, g in enumerate(gradients) if g.dtype != jax.dtypes.float0]
        if not real:
            return (gradients,)
        sent = tuple(gradients[i] for i in real)
        received = gradient(options.of_gradient(), _Rows(rows[i] for i in real), sent)
        by_position = dict(zip(real, received, strict=True))
        return (tuple(by_position.get(i) for i in range(len(gradients))),)

    collective.defvjp(forward, backward)

    def exact(options: Options, operands: Arrays) -> Arrays:
        in_program = _names.is_traced(operands) or _names.is_inside()
        _calls.check_room(options, operands, in_program=in_program)
        if in_program:
            return collective(options, tuple(map(_calls.checked_constant, operands)))
        # `collective` would convert the operands to 32 bits before they are combined.
        return _calls.call(kind, options, operands)

    return exact


def _gradient_of_allreduce(options: Options, _: _Rows, gradients: Arrays) -> Arrays:
    return _allreduce(options, gradients)


def _gradient_of_broadcast(options: Options, _: _Rows, gradients: Arrays) -> Arrays:
    averaged = _allreduce(replace(options, op=Average, root=0), gradients)
    if options.root == basics.rank():
        return averaged
    # Constants would take the collective out of this rank's program; zero times infinity is no number.
    zeros = [g * jnp.zeros((), g.dtype) for g in averaged]
    return tuple(jnp.where(z == 0, z, jnp.zeros_like(z)) for z in zeros)


def _gradient_of_allgather(options: Options, rows: _Rows, gradients: Arrays) -> Arrays:
    averaged = _allreduce(replace(options, op=Average), gradients)
    me = options.process_set.rank() or 0
    if _names.is_traced(gradients):
        starts = [me * n for n in rows]
    else:
        own = np.asarray([rows])
        (everyone,) = _calls.call(_calls.ALLGATHER, replace(options, name=None), (own,))
        starts = np.asarray(everyone)[:me].sum(0).tolist()
    return tuple(g[at : at + n] for g, at, n in zip(averaged, starts, rows, strict=True))


def _gradient_of_reducescatter(options: Options, _: _Rows, gradients: Arrays) -> Arrays:
    factor = options.prescale * options.postscale
    factor *= options.members() if options.op == Sum else 1
    if factor != 1:
        gradients = tuple(g * jnp.asarray(factor, g.dtype) for g in gradients)
    return _allgather(replace(options, op=None, prescale=1.0, postscale=1.0), gradients)


def _gradient_of_alltoall(options: Options, _: _Rows, gradients: Arrays) -> Arrays:
    return _alltoall(options, gradients)


_allreduce = _differentiable(_calls.ALLREDUCE, _gradient_of_allreduce)
_broadcast = _differentiable(_calls.BROADCAST, _gradient_of_broadcast)
_allgather = _differentiable(_calls.ALLGATHER, _gradient_of_allgather)
_reducescatter = _differentiable(_calls.REDUCESCATTER, _gradient_of_reducescatter)
_alltoall = _differentiable(_calls.ALLTOALL, _gradient_of_alltoall)


# ---- arguments -------------------------------------------------------------------------------------------------------


def _options(process_set: ProcessSet, name: str | None, root: int = 0) -> Options:
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name is a string, the same on every rank, not {type(name).__name__}")
    return Options(name or None, process_set, root=root)


def _reducing(name: str | None, reduction: Reduction) -> Options:
    factors: tuple[Any, ...] = (reduction.prescale_factor, reduction.postscale_factor)
    for factor in factors:
        if isinstance(factor, jax.core.Tracer):
            raise TypeError(
                "prescale_factor and postscale_factor are Python numbers; multiply the array by what is computed."
            )
    prescale, postscale = map(float, factors)
    options = _options(reduction.process_set, name)
    return replace(options, op=reduction.op, prescale=prescale, postscale=postscale)


def _named(options: Options, operands: Arrays) -> Options:
    if not _names.is_traced(operands):
        return options
    name = options.name if options.name is not None else _names.of_call(operands)
    return replace(
        options,
        name=name,
        is_recomputed=_names.is_recomputed(),
        is_nested=_names.is_nested(),
    )


def _on_tree(collective: _Collective, options: Options, tree: Any) -> Any:
    if options.op is not None:
        _refuse_sparse(tree)
    leaves, structure = jax.tree.flatten(tree)
    if not leaves:
        return tree
    options = _named(options, tuple(leaves))
    return jax.tree.unflatten(structure, collective(options, tuple(leaves)))


def _on_list(collective: _Collective, options: Options, tensors: Sequence[Any]) -> list[Any]:
    tensors = tuple(tensors)
    require_members(tensors)
    if options.op is not None:
        _refuse_sparse(tensors)
    return list(collective(_named(options, tensors), tensors))


def _refuse_sparse(tree: Any) -> None:
    """Raise if a tree has a sparse array: that is a pytree itself, and its indices would be combined like values."""
    sparse = sys.modules.get("jax.experimental.sparse")
    if sparse is None:
        return
    for leaf in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, sparse.JAXSparse)):
        if isinstance(leaf, sparse.JAXSparse):
            raise ValueError(
                f"horovod.jax cannot combine sparse arrays ({type(leaf).__name__}): their indices would be combined, "
                "too. Pass x.todense()."
            )


def _scattering(op: int | str) -> int:
    op = resolve_op(op, None)
    if op not in (Average, Sum):
        raise HorovodInternalError("Reducescatter currently only supports AVERAGE and SUM.")
    return op
