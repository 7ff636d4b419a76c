"""The primitive of foreign calls whose results take their operands' memory, where XLA may give that up.

`jax.ffi.ffi_call` is told which operands to work on in place when it is traced. Only the lowered program tells which of
its arguments are donated; the others XLA would copy first, one more pass over both memories. What is said here decides
about copies alone: XLA never lets a call write where somebody else still reads.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jaxlib.mlir import ir

_in_place: Any = Primitive("horovod_in_place")
_in_place.multiple_results = True


def call(target: str, *operands: Any, **attributes: Any) -> Sequence[Any]:
    """Call XLA's foreign function `target`; each result has the shape and dtype of its operand.

    Under `vmap` a batch is one call; operands that are not batched are repeated.
    """
    arrays = [jnp.asarray(operand) for operand in operands]
    results: Sequence[Any] = _in_place.bind(
        *arrays, target=target, attributes=tuple(attributes.items())
    )
    return results


def _shapes(*operands: Any, **_: Any) -> list[Any]:
    return [operand.update(weak_type=False) for operand in operands]


@lru_cache
def _compiled(params: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    return jax.jit(partial(_in_place.bind, **dict(params)))


def _run(*operands: Any, **params: Any) -> Any:
    return _compiled(tuple(params.items()))(*operands)


def _lower(
    context: Any, *operands: Any, target: str, attributes: tuple[tuple[str, Any], ...]
) -> Any:
    aliases = {i: i for i, operand in enumerate(operands) if not _is_kept(operand)}
    rule = jax.ffi.ffi_lowering(target, operand_output_aliases=aliases)
    return rule(context, *operands, **dict(attributes))


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
    operands: Sequence[Any], dims: Sequence[Any], **params: Any
) -> tuple[Sequence[Any], list[int]]:
    pairs = list(zip(operands, dims, strict=True))
    (size,) = {x.shape[dim] for x, dim in pairs if dim is not None}
    batched = [
        jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)
        for x, dim in pairs
    ]
    return _in_place.bind(*batched, **params), [0] * len(batched)


_in_place.def_abstract_eval(_shapes)
_in_place.def_impl(_run)
# Not shared between equal calls: these differ in which operands are arguments.
try:
    mlir.register_lowering(_in_place, _lower, cacheable=False)
except TypeError:  # older versions of JAX share none
    mlir.register_lowering(_in_place, _lower)
batching.primitive_batchers[_in_place] = _batch
