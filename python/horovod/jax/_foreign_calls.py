"""The primitive of foreign calls: results that take their operands' memory, and programs with a fixed order.

`jax.ffi.ffi_call` is told which operands to work on in place when it is traced. Only the lowered program tells which of
its arguments are donated; the others XLA would copy first, one more pass over both memories. The choice here decides
about copies alone: XLA never lets a call write to memory that another operation still reads.

On a GPU a call waits for the other ranks before the next one begins, so all ranks must make a program's calls in one
order. So they must on the CPU where XLA runs a program's parts one after the other: short ones, and those with small
arrays only. XLA orders what is independent by itself, for each process anew: by what else the program computes, by what
is donated, by what it has measured of kernels. So each call has one operand more, a result of the call before it, which
the core passes over.

That ends at the borders of functions inside a program: of branches, loops, an inner `jit`. On GPUs calls there have an
ordered effect, for which JAX hands a token from each function to the next; all other calls of such a program take the
token, too. JAX starts programs that have an effect more slowly, from Python (4 ms instead of 0.2 ms for 160 arrays on
one machine), so other calls have none. On CPUs it must be asked for: there equal programs have equal orders.
"""

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import core, effects  # others may have effects, but JAX says so in no public place
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jaxlib.mlir import ir

from horovod import _core

_log = logging.getLogger("horovod")

Shapes = tuple[tuple[int, ...], ...]


class _Order(effects.Effect):
    """Effect of calls in functions inside of programs, so that JAX keeps them in the script's order."""

    def __str__(self) -> str:
        return "Horovod's order"


_order: Any = _Order()
for _kinds in (
    effects.ordered_effects,
    effects.lowerable_effects,
    effects.control_flow_allowed_effects,
    effects.custom_derivatives_allowed_effects,
    effects.remat_allowed_effects,
    effects.shardable_ordered_effects,  # refused with better words
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
        has_effect=is_nested and _is_order_kept_inside(),
        attributes=tuple(attributes.items()),
    )
    return results


def _is_order_kept_inside() -> bool:
    """Whether calls in functions inside a program, which is traced now, are ordered among those of all others."""
    return _core.jax_ordered_calls() or jax.default_backend() != "cpu"


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
    if (devices := _local_devices(context.module_context.axis_context)) > 1:
        raise ValueError(
            f"{target.removeprefix('horovod_xla_')} in a program for {devices} devices of one rank (arrays that are "
            "sharded over them, shard_map, pmap): each device would make the call, and values of different devices be "
            "mixed up. Start one rank for each device, or call it outside of this program."
        )
    given: dict[str, Any] = dict(attributes)
    token = context.tokens_in.get(_order) if _order in context.tokens_in.effects() else None
    # A token comes before the operands, and before the results.
    first = 0 if token is None else 1
    aliases = {}
    if shapes is None:
        kept = [_is_kept(operand) for operand in operands]
        aliases = {first + i: first + i for i in range(len(operands)) if not kept[i]}
    rule = jax.ffi.ffi_lowering(target, operand_output_aliases=aliases)
    block = ir.InsertionPoint.current.block
    if "is_unordered" in given and (token is not None or _is_program(block)):
        given["is_unordered"] = np.int32(0)
    if token is not None:
        with_token = context.replace(
            avals_in=[core.abstract_token, *context.avals_in],
            avals_out=[core.abstract_token, *context.avals_out],
        )
        token, *results = rule(with_token, token, *operands, **given)
        tokens = mlir.TokenSet({_order: token})
        context.set_tokens_out(context.tokens_in.update_tokens(tokens))
        return results
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
    if len(calls) == len(others) == 1 and _is_order_kept_inside():
        _log.warning(
            "A compiled program has operations of Horovod in several functions, one of which JAX had compiled alone "
            "before: nothing orders them (here %s), so ranks may wait for each other for ever. Use that function only "
            "inside of other programs, or without its jit.",
            given["name"],
        )
    calls[:] = [*others, (block, results)]
    return results


def _local_devices(axes: Any) -> int:
    """On how many devices of this process the program that is being lowered runs."""
    known: Iterable[Any] | None
    if hasattr(axes, "mesh"):
        # An abstract mesh has no devices.
        known = axes.mesh.devices.flat if isinstance(axes.mesh, jax.sharding.Mesh) else None
        count = axes.mesh.size
    elif hasattr(axes, "axis_env"):  # of older versions
        known, count = None, axes.axis_env.nreps
    else:
        known, count = axes.device_assignment, axes.num_devices
    if known is not None:
        return sum(device.process_index == jax.process_index() for device in known)
    return int(count)


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


def _is_program(block: Any) -> bool:
    """Whether it is the whole program, not a function in it."""
    function = block.owner.operation
    if function.name != "func.func" or "sym_visibility" not in function.attributes:
        return False
    return bool(function.attributes["sym_visibility"] == ir.StringAttr.get("public"))


def _is_kept(operand: Any) -> bool:
    """Whether it is an argument of the whole program that the caller does not donate."""
    block = operand.owner
    if not isinstance(block, ir.Block) or not _is_program(block):
        return False
    function: Any = block.owner.operation
    if "arg_attrs" not in function.attributes:
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
    params["has_effect"] = _is_order_kept_inside()
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
