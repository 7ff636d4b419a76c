"""The primitive of foreign calls: results that take their operands' memory, and programs for GPUs with a fixed order.

`jax.ffi.ffi_call` is told which operands to work on in place when it is traced. Only the lowered program tells which of
its arguments are donated; the others XLA would copy first, one more pass over both memories. What is said here decides
about copies alone: XLA never lets a call write where somebody else still reads.

On a GPU a call waits for the other ranks before the next one begins, so all ranks must make a program's calls in one
order. XLA orders what is independent by itself, for each process anew: by what it has measured there of kernels, too.
So in programs for CUDA each call has one operand more, a result of the call before it, which the core passes over.

That ends at the borders of functions inside a program: of branches, loops, an inner `jit`. There calls have an ordered
effect, for which JAX hands a token from each function to the next; all other calls of such a program take the token,
too. Not every call has the effect, because JAX starts programs that have one more slowly (the time of `jit`'s Python
path: 4 ms instead of 0.2 ms for 160 arrays on one machine).
"""

import logging
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import core, effects  # others may have effects, but JAX says so in no public place
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jaxlib.mlir import ir

_log = logging.getLogger("horovod")

Shapes = tuple[tuple[int, ...], ...]

# Platforms on whose devices all ranks have to make a program's calls in one order, and JAX's names of their backends.
_IN_ORDER = {"cuda"}
_BACKENDS = {"gpu": "cuda"}


class _Order(effects.Effect):
    """What calls do in functions inside of programs, so that JAX keeps them in the script's order."""

    def __str__(self) -> str:
        return "Horovod's order"


_order: Any = _Order()
for _kinds in (
    effects.ordered_effects,
    effects.lowerable_effects,
    effects.control_flow_allowed_effects,
    effects.custom_derivatives_allowed_effects,
    effects.remat_allowed_effects,
):
    _kinds.add_type(_Order)

_foreign: Any = Primitive("horovod_foreign_call")
_foreign.multiple_results = True

# Blocks with calls of each program that is being lowered, and results of the last call of each.
_last_calls: "weakref.WeakKeyDictionary[Any, list[tuple[Any, list[Any]]]]" = (
    weakref.WeakKeyDictionary()
)


def call(
    target: str, shapes: Shapes | None, is_nested: bool, *operands: Any, **attributes: Any
) -> Sequence[Any]:
    """Call XLA's foreign function `target`; each operand has a result of its dtype.

    `shapes` are the results'; None: those of the operands, whose memory they take where nobody else needs it. Under
    `vmap` a batch is one call then, in which operands that are not batched are repeated; otherwise one call for each.
    `is_nested`: it is in a function inside a program.
    """
    arrays = [jnp.asarray(operand) for operand in operands]
    results: Sequence[Any] = _foreign.bind(
        *arrays,
        target=target,
        shapes=shapes,
        has_effect=is_nested and _are_in_order(),
        attributes=tuple(attributes.items()),
    )
    return results


def _are_in_order() -> bool:
    """Whether programs that are traced now may be for a device on which calls have to be in one order."""
    backend = jax.default_backend()
    return _BACKENDS.get(backend, backend) in _IN_ORDER


def _results(
    *operands: Any, shapes: Shapes | None, has_effect: bool, **_: Any
) -> tuple[list[Any], set[Any]]:
    if shapes is None:
        results = [operand.update(weak_type=False) for operand in operands]
    else:
        pairs = zip(shapes, operands, strict=True)
        results = [jax.core.ShapedArray(shape, operand.dtype) for shape, operand in pairs]
    return results, {_order} if has_effect else set()


@lru_cache
def _compiled(params: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    return jax.jit(partial(_foreign.bind, **dict(params)))


def _run(*operands: Any, **params: Any) -> Any:
    return _compiled(tuple(params.items()))(*operands)


def _lower(
    context: Any,
    *operands: Any,
    target: str,
    shapes: Shapes | None,
    has_effect: bool,
    attributes: tuple[tuple[str, Any], ...],
) -> Any:
    given = dict(attributes)
    token = context.tokens_in.get(_order) if _order in context.tokens_in.effects() else None
    # A token comes before the operands, and before the results.
    first = 0 if token is None else 1
    aliases = {}
    if shapes is None:
        kept = [_is_kept(operand) for operand in operands]
        aliases = {first + i: first + i for i in range(len(operands)) if not kept[i]}
    rule = jax.ffi.ffi_lowering(target, operand_output_aliases=aliases)
    if token is not None:
        # Several places are in order, too.
        given["at_one_place"] = np.int32(0)
        with_token = context.replace(
            avals_in=[core.abstract_token, *context.avals_in],
            avals_out=[core.abstract_token, *context.avals_out],
        )
        token, *results = rule(with_token, token, *operands, **given)
        tokens = mlir.TokenSet({_order: token})
        context.set_tokens_out(context.tokens_in.update_tokens(tokens))
        return results
    if _IN_ORDER.isdisjoint(context.module_context.platforms):
        return rule(context, *operands, **given)
    block = ir.InsertionPoint.current.block
    calls = _last_calls.setdefault(context.module_context.module, [])
    before = next((results for at, results in reversed(calls) if at == block), None)
    if before is not None and not any(_is_made_of(before, operand) for operand in operands):
        after = min(before, key=_size_to_keep)
        shape = tuple(ir.RankedTensorType(after.type).shape)
        # Of the type only the shape counts, which makes the layout.
        avals = [*context.avals_in, jax.core.ShapedArray(shape, np.dtype(np.uint8))]
        context = context.replace(avals_in=avals)
        operands, given = (*operands, after), given | {"after": np.int32(1)}
    results = list(rule(context, *operands, **given))
    others = [(at, its) for at, its in calls if at != block]
    if len(calls) == len(others) == 1:
        _log.warning(
            "A compiled program has operations of Horovod in several functions, one of which JAX had compiled alone "
            "before: nothing orders them (here %s), so ranks may wait for each other for ever. Use that function only "
            "inside of other programs, or without its jit.",
            given["name"],
        )
    calls[:] = [*others, (block, results)]
    return results


def _is_made_of(values: list[Any], value: Any) -> bool:
    """Whether it is one of the values, perhaps in another shape or type.

    Then it comes after them anyway; and XLA would copy it if a call that works on it in place were to read it, too.
    """
    while value not in values:
        owner = value.owner
        if isinstance(owner, ir.Block) or len(owner.operands) != 1:
            return False
        value = owner.operands[0]
    return True


def _size_to_keep(value: Any) -> tuple[bool, int]:
    """The smallest keeps the least memory; but XLA takes arrays without elements out of a program."""
    size = int(np.prod(ir.RankedTensorType(value.type).shape))
    return size == 0, size


def _is_kept(operand: Any) -> bool:
    """Whether it is an argument of the whole program that the caller does not donate."""
    block = operand.owner
    if not isinstance(block, ir.Block):
        return False
    function: Any = block.owner.operation
    if function.name != "func.func" or "arg_attrs" not in function.attributes:
        return False
    if function.attributes["sym_visibility"] != ir.StringAttr.get("public"):
        return False
    given = function.attributes["arg_attrs"][ir.BlockArgument(operand).arg_number]
    return not ("jax.buffer_donor" in given or "tf.aliasing_output" in given)


def _batch(
    operands: Sequence[Any], dims: Sequence[Any], *, shapes: Shapes | None, **params: Any
) -> tuple[Sequence[Any], list[int]]:
    pairs = list(zip(operands, dims, strict=True))
    (size,) = {x.shape[dim] for x, dim in pairs if dim is not None}
    batched = [
        jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)
        for x, dim in pairs
    ]
    if shapes is None:
        return _foreign.bind(*batched, shapes=None, **params), [0] * len(batched)
    params["has_effect"] = _are_in_order()
    bind = partial(_foreign.bind, shapes=shapes, **params)
    return jax.lax.map(lambda xs: bind(*xs), batched), [0] * len(batched)


_foreign.def_effectful_abstract_eval(_results)
_foreign.def_impl(_run)
# Not shared between equal calls: these differ in which operands are arguments.
try:
    mlir.register_lowering(_foreign, _lower, cacheable=False)
except TypeError:  # older versions of JAX share none
    mlir.register_lowering(_foreign, _lower)
batching.primitive_batchers[_foreign] = _batch
