"""Training that survives ranks that die, hosts that leave and hosts that come: `hvd.elastic`."""

import copy
import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from horovod.common import elastic as _elastic
from horovod.common._state_handlers import (
    HandledState,
    HandlerRegistry,
    StateHandler,
    refuse_other_shapes,
)
from horovod.common.api import init, shutdown
from horovod.common.elastic import ObjectState, State
from horovod.common.exceptions import (
    HorovodInternalError,
    HorovodStalledError,
    ReplicasDifferError,
)
from horovod.jax.functions import broadcast_parameters, is_key

__all__ = ["JaxState", "ObjectState", "State", "init", "run", "shutdown"]

_S = TypeVar("_S", bound=State)
_P = ParamSpec("_P")
_T = TypeVar("_T")


def run(func: Callable[Concatenate[_S, _P], _T]) -> Callable[Concatenate[_S, _P], _T]:
    """Decorate the training function `func(state, ...)`: it is called again whenever the job's members change.

    As of every framework; what fails inside compiled programs because a rank was lost is caught too. JAX runs programs
    while Python goes on, so that may be raised by a later line, `state.commit()` at the latest.

    Examples
    --------
    >>> @hvd.elastic.run
    ... def train(state):
    ...     for state.step in range(state.step, steps):
    ...         state.params, state.opt_state = step(state.params, state.opt_state, batch(state.step))
    ...         state.commit()
    >>> train(hvd.elastic.JaxState(params=params, opt_state=opt_state, step=0))
    """

    @functools.wraps(func)
    def translated(state: _S, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return func(state, *args, **kwargs)
        except (RuntimeError, ValueError) as error:  # XLA's are the one or the other
            raise_if_ours(error)
            raise

    return _elastic.run(translated)  # type: ignore[arg-type]


def raise_if_ours(error: Exception) -> None:
    """Raise Horovod's own exception for an error of XLA's that stands for one."""
    text = str(error)
    for kind in (HorovodStalledError, ReplicasDifferError, HorovodInternalError):
        _, mark, message = text.partition(f"{kind.__name__}: ")
        if mark:
            raise kind(message) from error


class _PytreeHandler(StateHandler):
    """Of pytrees with arrays, which are replaced and not changed."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self._saved: Any = None
        self.save()

    def save(self) -> None:
        """Copy all arrays to host memory: JAX gives those that a program was donated to others."""
        self._saved = jax.tree.map(_copied, self.value)

    def restore(self) -> None:
        """Have arrays of what was saved."""
        self.value = jax.tree.map(_restored, self._saved, is_leaf=_is_copy)

    def saved(self) -> dict[str, Any]:
        """The leaves by their paths in the tree, arrays of JAX as arrays of NumPy."""
        leaves, _ = jax.tree_util.tree_flatten_with_path(self._saved, is_leaf=_is_copy)
        return {
            jax.tree_util.keystr(path): leaf.values if _is_copy(leaf) else leaf
            for path, leaf in leaves
        }

    def refuse_others(self, state: dict[str, Any]) -> None:
        """Raise ValueError for other paths or shapes of leaves."""
        own = self.saved()
        if state.keys() != own.keys():
            raise ValueError(
                f"only the file has the leaves {sorted(state.keys() - own.keys())}, only the state has "
                f"{sorted(own.keys() - state.keys())}"
            )
        refuse_other_shapes([state[path] for path in own], list(own.values()))

    def load(self, state: dict[str, Any]) -> None:
        """Have arrays of these leaves, on the devices of the present ones."""
        leaves, tree = jax.tree.flatten(self._saved, is_leaf=_is_copy)
        loaded = [
            leaf.with_values(state[path]) if _is_copy(leaf) else state[path]
            for leaf, path in zip(leaves, self.saved(), strict=True)
        ]
        self._saved = jax.tree.unflatten(tree, loaded)
        self.restore()

    def sync(self) -> None:
        """Have the root's arrays."""
        self.value = broadcast_parameters(self.value, self.root_rank, name="elastic.pytree")

    def set_value(self, value: Any) -> None:
        """Handle another value from now on, which the next `save` copies."""
        self.value = value


class _Copy:
    """An array in host memory, and where it came from."""

    def __init__(self, array: jax.Array) -> None:
        self.key_impl = jax.random.key_impl(array) if is_key(array) else None
        self.sharding = array.sharding
        self.values = np.array(jax.random.key_data(array) if self.key_impl else array)

    def with_values(self, values: Any) -> "_Copy":
        """The same array with other values."""
        other = copy.copy(self)
        other.values = np.asarray(values, self.values.dtype)
        return other

    def restored(self) -> Any:
        # A copy: what JAX computes with must not be what is saved.
        if self.key_impl is not None:
            return jax.random.wrap_key_data(jnp.array(self.values), impl=self.key_impl)
        return jax.device_put(self.values.copy(), self.sharding)


def _is_copy(leaf: Any) -> bool:
    return isinstance(leaf, _Copy)


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        return _Copy(leaf)
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def _restored(leaf: Any) -> Any:
    if isinstance(leaf, _Copy):
        return leaf.restored()
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


class _PytreeRegistry(HandlerRegistry):
    """Takes every value in which an array of JAX is."""

    def handler_of(self, value: Any) -> StateHandler | None:
        if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(value)):
            return _PytreeHandler(value)
        return super().handler_of(value)


class JaxState(HandledState):
    """State of a training with JAX: pytrees with arrays, and plain objects.

    Snapshots are copies in host memory. After each change of members JAX's compiled programs are dropped
    (`jax.clear_caches`), for ranks and sizes are part of them.

    Parameters
    ----------
    values
        Names and initial values of attributes. Pytrees in which an array of JAX is (parameters, the state of an
        optimizer, flax's `TrainState`, random keys) are copied and broadcast array by array; everything else is a plain
        object as in `ObjectState`.

    Examples
    --------
    >>> state = hvd.elastic.JaxState(params=params, opt_state=tx.init(params), epoch=0)
    """

    _handler_registry = _PytreeRegistry([])

    def reset(self) -> None:
        """Drop compiled programs: they hold the old rank and size."""
        super().reset()
        jax.clear_caches()  # type: ignore[no-untyped-call]
