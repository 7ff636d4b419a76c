"""Parameters that start equal on all ranks: `broadcast_parameters`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from horovod.common._objects import broadcast_object
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.jax import _names
from horovod.jax._calls import Options, broadcast_at_once

# Kind of a leaf, beside arrays and objects.
_KEY = "random key"


def broadcast_parameters(
    params: Any,
    root_rank: int = 0,
    *,
    name: str = "broadcast_parameters",
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the root's pytree on every rank: parameters, an optimizer's state, random keys.

    JAX's arrays cannot be changed, so assign the result. Not for traced programs.

    Parameters
    ----------
    params
        A pytree of the same structure on every rank. Arrays come back as arrays, of the root's shapes and dtypes;
        leaves that are no arrays (numbers, strings) are the root's objects.
    root_rank
        Global rank of the root.
    name
        Pairs the call across ranks, for when several threads send parameters at the same time.
    process_set
        The ranks that take part.

    Raises
    ------
    ValueError
        This rank's pytree is not like the root's, or as in `broadcast`.
    HorovodInternalError
        As in `broadcast`.

    Examples
    --------
    >>> params = hvd.broadcast_parameters(params, root_rank=0)
    """
    with_paths, structure = jax.tree_util.tree_flatten_with_path(params)
    leaves = [leaf for _, leaf in with_paths]
    if _names.is_traced(tuple(leaves)):
        raise ValueError(
            "broadcast_parameters works on values, outside of jit and other transformations; inside, use broadcast."
        )
    mine = [_described(jax.tree_util.keystr(path), leaf) for path, leaf in with_paths]
    roots = broadcast_object(mine, root_rank, f"{name}.structure", process_set)
    _check_like_roots(mine, roots, root_rank)
    arrays = {i: _as_numpy(leaf) for i, leaf in enumerate(leaves) if mine[i][1] is not None}
    options = Options(name, process_set, root=root_rank)
    received = broadcast_at_once(tuple(arrays.values()), options)
    for i, value in zip(arrays, received, strict=True):
        leaves[i] = _like(leaves[i], value)
    for i, (_, kind, obj) in enumerate(roots):
        if kind is None:
            leaves[i] = obj
    return jax.tree.unflatten(structure, leaves)


def is_key(leaf: Any) -> bool:
    """Whether it is an array of random keys, whose values JAX hides."""
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _described(path: str, leaf: Any) -> tuple[str, str | None, Any]:
    """Its path; shape and dtype as text, None of what is no array; and that itself."""
    if is_key(leaf):
        return path, f"{_KEY} {leaf.shape} {leaf.dtype}", None
    if isinstance(leaf, jax.Array | np.ndarray):
        return path, f"array {leaf.shape} {leaf.dtype}", None
    return path, None, leaf


def _check_like_roots(mine: list[Any], roots: list[Any], root_rank: int) -> None:
    for (path, kind, _), (root_path, root_kind, _) in zip(mine, roots, strict=False):
        if path != root_path or kind != root_kind:
            raise ValueError(
                f"this rank's pytree has {path or 'its only leaf'} ({kind or 'no array'}) where that of root rank "
                f"{root_rank} has {root_path or 'its only leaf'} ({root_kind or 'no array'}); build the same model on "
                "every rank before broadcast_parameters"
            )
    if len(mine) != len(roots):
        raise ValueError(
            f"this rank's pytree has {len(mine)} leaves, that of root rank {root_rank} has {len(roots)}; build the "
            "same model on every rank before broadcast_parameters"
        )


def _as_numpy(leaf: Any) -> Any:
    return np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)


def _like(leaf: Any, value: Any) -> Any:
    if is_key(leaf):
        return jax.random.wrap_key_data(jnp.asarray(value), impl=jax.random.key_impl(leaf))
    if isinstance(leaf, np.ndarray):
        return value
    return jax.device_put(value, leaf.sharding)
