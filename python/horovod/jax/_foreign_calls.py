"""The primitive of foreign calls: results that take their operands' memory, and programs with a fixed order.

`jax.ffi.ffi_call` is told which operands to work on in place when it is traced. Only the lowered program tells which of
its arguments are donated; the others XLA would copy first, one more pass over both memories. What is said here decides
about copies alone: XLA never lets a call write where somebody else still reads.

On a GPU a call waits for the other ranks before the next one begins, so all ranks must make a program's calls in one
order. So they must on the CPU where XLA runs a program's parts one after the other: short ones, and those with small
arrays only. XLA orders what is independent by itself, for each process anew: by what else the program computes, by what
is donated, by what it has measured of kernels. So each call has one operand more, a result of the call before it, which
the core passes over.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jaxlib.mlir import ir

Shapes = tuple[tuple[int, ...], ...]

_foreign: Any = Primitive("horovod_foreign_call")
_foreign.multiple_results = True

# Blocks with calls of each program that is being lowered, and results of the last call of each.
_last_calls: "weakref.WeakKeyDictionary[Any, list[tuple[Any, list[Any]]]]" = (
    weakref.WeakKeyDictionary()
)


def call(target: str, shapes: Shapes | None, *operands: Any, **attributes: Any) -> Sequence[Any]:
    """Call XLA's foreign function `target`; each operand has a result of its dtype.

    `shapes` are the results'; None: those of the operands, whose memory they take where nobody else needs it. Under
    `vmap` a batch is one call then, in which operands that are not batched are repeated; otherwise one call for each.
    """
    arrays = [jnp.asarray(operand) for operand in operands]
    results: Sequence[Any] = _foreign.bind(
        *arrays, target=target, shapes=shapes, attributes=tuple(attributes.items())
    )
    return results


def _results(*operands: Any, shapes: Shapes | None, **_: Any) -> list[Any]:
    if shapes is None:
        return [operand.update(weak_type=False) for operand in operands]
    return [
        jax.core.ShapedArray(shape, operand.dtype)
        for shape, operand in zip(shapes, operands, strict=True)
    ]


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
    attributes: tuple[tuple[str, Any], ...],
) -> Any:
    if (devices := _local_devices(context.module_context.axis_context)) > 1:
        raise ValueError(
            f"{target.removeprefix('horovod_xla_')} in a program for {devices} devices of one rank (arrays that are "
            "sharded over them, shard_map, pmap): each device would make the call, and values of different devices be "
            "mixed up. Start one rank for each device, or call it outside of this program."
        )
    aliases = {}
    if shapes is None:
        aliases = {i: i for i, operand in enumerate(operands) if not _is_kept(operand)}
    rule = jax.ffi.ffi_lowering(target, operand_output_aliases=aliases)
    given = dict(attributes)
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
    calls[:] = [(at, its) for at, its in calls if at != block]
    calls.append((block, results))
    return results


def _local_devices(axes: Any) -> int:
    """On how many devices of this process the program that is being lowered runs."""
    if hasattr(axes, "mesh"):
        known, count = getattr(axes.mesh, "_flat_devices_tuple", None), axes.mesh.size
    else:
        known, count = getattr(axes, "device_assignment", None), getattr(axes, "num_devices", 1)
    if known:
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
    bind = partial(_foreign.bind, shapes=shapes, **params)
    results = bind(*batched) if shapes is None else jax.lax.map(lambda xs: bind(*xs), batched)
    return results, [0] * len(batched)


_foreign.def_abstract_eval(_results)
_foreign.def_impl(_run)
# Not shared between equal calls: these differ in which operands are arguments.
try:
    mlir.register_lowering(_foreign, _lower, cacheable=False)
except TypeError:  # older versions of JAX share none
    mlir.register_lowering(_foreign, _lower)
batching.primitive_batchers[_foreign] = _batch
