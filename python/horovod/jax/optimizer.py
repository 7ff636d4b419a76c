"""`DistributedOptimizer` for optax, and gradients that are reduced as they are computed."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from horovod.common._compression import Compressor, NoneCompressor
from horovod.common._ops import Average, resolve_op
from horovod.common._optimizer_settings import check_arguments
from horovod.common._reduction import Reduction
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.util import split_list
from horovod.jax import _names
from horovod.jax._first_step import FirstUpdate
from horovod.jax._operations import grouped_allreduce

__all__ = [
    "AccumulatedGradients",
    "DistributedOptimizer",
    "allreduce_gradients",
    "grad",
    "value_and_grad",
]


class AccumulatedGradients(NamedTuple):
    """State of a `DistributedOptimizer` with several backward passes per step."""

    inner: Any
    """State of the wrapped optimizer."""
    passes: Any
    """Backward passes since the last step, an int32."""
    gradients: Any
    """Their sum on this rank."""


def allreduce_gradients(
    grads: Any,
    *,
    op: int | str = Average,
    compression: type[Compressor] = NoneCompressor,
    gradient_predivide_factor: float = 1.0,
    groups: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce a pytree of gradients, as one operation or as several.

    Parameters
    ----------
    grads
        A pytree of arrays, the same on every rank.
    op
        `hvd.Average`, `Sum` or `Adasum`.
    compression
        `hvd.Compression.none`, `fp16` or `bf16`.
    gradient_predivide_factor
        With Average: gradients are divided by it before the sum, and by the number of ranks over it afterwards.
    groups
        So many operations, each with as many arrays; 0: one.
    name, process_set
        As in `allreduce`, which also tells the errors.
    """
    op = resolve_op(op, None)
    leaves, structure = jax.tree.flatten(grads)
    if not leaves:
        return grads
    if name is None:
        name = _names.of_call(tuple(leaves)) if _names.is_traced(tuple(leaves)) else None
    elif _names.is_traced(tuple(leaves)):
        name = _names.numbered(name, tuple(leaves))
    reduction = Reduction.of_gradients(op, gradient_predivide_factor, process_set)
    pairs = [compression.compress(leaf) for leaf in leaves]
    parts = split_list(pairs, groups) if groups else [pairs]
    reduced: list[Any] = []
    for i, part in enumerate(part for part in parts if part):
        results = grouped_allreduce(
            [sent for sent, _ in part],
            name=name if name is None or not groups else f"{name}.{i}",
            **reduction._asdict(),
        )
        contexts = [context for _, context in part]
        reduced += [compression.decompress(*pair) for pair in zip(results, contexts, strict=True)]
    return jax.tree.unflatten(structure, reduced)


def DistributedOptimizer(
    optimizer: Any,
    *,
    op: int | str = Average,
    compression: type[Compressor] = NoneCompressor,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    gradient_predivide_factor: float = 1.0,
    groups: int = 0,
    name: str = "DistributedOptimizer",
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Wrap an optimizer of optax: `update` reduces the gradients over the ranks before they are used.

    The result is a `GradientTransformationExtraArgs`, to be used inside `jit` like any: in `optax.chain`,
    `flax.training.train_state.TrainState`, `lax.scan`. A transformation before it in a chain gets this rank's gradients
    only, so clipping by norm belongs inside: `DistributedOptimizer(optax.chain(clip_by_global_norm(1.0), sgd(0.1)))`.

    Parameters
    ----------
    optimizer
        Any `optax.GradientTransformation`.
    op, compression, gradient_predivide_factor, groups, process_set
        As in `allreduce_gradients`.
    backward_passes_per_step
        Calls of `update` that add gradients up before they are reduced and used; in between the updates are zero, and
        the state is an `AccumulatedGradients`.
    average_aggregated_gradients
        Divide the sum of several passes by their number.
    name
        Pairs operations across ranks: several optimizers in one program need different names.

    Raises
    ------
    TypeError
        `optimizer` is no `GradientTransformation`, but for example something around one.

    Examples
    --------
    >>> tx = hvd.DistributedOptimizer(optax.adam(1e-3 * hvd.size()))
    >>> opt_state = tx.init(params)
    >>> updates, opt_state = tx.update(grads, opt_state, params)
    """
    import optax  # type: ignore[import-untyped]  # horovod.jax does not need it, and it takes its time

    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise TypeError(
            f"hvd.DistributedOptimizer() takes an optax.GradientTransformation, such as optax.sgd(0.1), not "
            f"{type(optimizer).__name__}. Where it has one inside, wrap that, and make the "
            f"{type(optimizer).__name__} around the result."
        )
    op = resolve_op(op, None)
    check_arguments(op, gradient_predivide_factor, backward_passes_per_step, None, None)
    wrapped = optax.with_extra_args_support(optimizer)
    passes = backward_passes_per_step
    first = FirstUpdate(name, process_set)

    def reduce(grads: Any) -> Any:
        return allreduce_gradients(
            grads,
            op=op,
            compression=compression,
            gradient_predivide_factor=gradient_predivide_factor,
            groups=groups,
            name=name,
            process_set=process_set,
        )

    def init(params: Any) -> Any:
        inner = wrapped.init(params)
        if passes == 1:
            return inner
        zeros = jax.tree.map(jnp.zeros_like, params)
        return AccumulatedGradients(inner, jnp.zeros((), jnp.int32), zeros)

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        grads = first.note(grads, params)
        if passes == 1:
            return wrapped.update(reduce(grads), state, params, **extra)  # type: ignore[no-any-return]
        added = jax.tree.map(jnp.add, state.gradients, grads)

        def step(_: None) -> tuple[Any, Any]:
            total = (
                jax.tree.map(lambda g: g / passes, added) if average_aggregated_gradients else added
            )
            updates, inner = wrapped.update(reduce(total), state.inner, params, **extra)
            zeros = jax.tree.map(jnp.zeros_like, added)
            return updates, AccumulatedGradients(inner, jnp.zeros((), jnp.int32), zeros)

        def wait(_: None) -> tuple[Any, Any]:
            zeros = jax.tree.map(jnp.zeros_like, grads)
            return zeros, AccumulatedGradients(state.inner, state.passes + 1, added)

        # Every rank counts alike, so all take the same branch.
        return jax.lax.cond(state.passes + 1 >= passes, step, wait, None)  # type: ignore[no-any-return]

    return optax.GradientTransformationExtraArgs(init, update)


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    **reduction: Any,
) -> Callable[..., Any]:
    """As `jax.value_and_grad`, with gradients that are reduced over the ranks; the value stays this rank's.

    `reduction` are keywords of `allreduce_gradients`.

    Examples
    --------
    >>> loss, grads = jax.jit(hvd.value_and_grad(loss_fn))(params, batch)
    >>> loss = hvd.allreduce(loss)
    """
    differentiated = jax.value_and_grad(fun, argnums, has_aux)

    def reduced(*args: Any, **kwargs: Any) -> Any:
        value, grads = differentiated(*args, **kwargs)
        return value, allreduce_gradients(grads, **reduction)

    return reduced


def grad(
    fun: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    **reduction: Any,
) -> Callable[..., Any]:
    """As `jax.grad`, with gradients that are reduced over the ranks; else as `value_and_grad`."""
    both = value_and_grad(fun, argnums, has_aux, **reduction)

    def reduced(*args: Any, **kwargs: Any) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return reduced
