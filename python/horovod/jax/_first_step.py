"""Reports parameters that are given to an optimizer's first update, in compiled programs by a foreign call of XLA.

In a program the call stands in every step, and returns at once after the first one. Gradients are made to depend on it,
so it comes before the update.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from horovod import _core
from horovod.common import _replicas
from horovod.common._dtypes import CODES
from horovod.common.process_sets import ProcessSet
from horovod.jax import _calls, _names

_ADVICE = "Call params = hvd.broadcast_parameters(params, {}) before training."
_TARGET = "horovod_xla_report"


class _Readable:
    """Arrays of JAX."""

    def shape_of(self, tensor: Any) -> _replicas.Shape:
        return tensor.dtype.name, tensor.shape, tensor.dtype.itemsize

    def checksum(self, tensor: Any, parts: Sequence[slice]) -> int:
        if len(parts) == 1:
            return _replicas.checksum_of([np.asarray(tensor)])
        flat = tensor.reshape(-1)
        return _replicas.checksum_of([np.asarray(flat[part]) for part in parts])


class FirstUpdate:
    """Of one optimizer."""

    def __init__(self, name: str, process_set: ProcessSet) -> None:
        self._name = name
        self._process_set = process_set
        self._first = _replicas.FirstStep(process_set)

    def note(self, grads: Any, params: Any) -> Any:
        """Note parameters that are about to be updated; return the gradients to do it with."""
        leaves = [
            (jax.tree_util.keystr(path), leaf)
            for path, leaf in jax.tree_util.tree_leaves_with_path(params)
            if hasattr(leaf, "dtype") and str(leaf.dtype) in CODES
        ]
        if not leaves:
            return grads
        advice = _ADVICE.format(_replicas.arguments(self._process_set))
        if not any(isinstance(leaf, jax.core.Tracer) for _, leaf in leaves):
            if self._first.is_due():
                _replicas.report(leaves, _Readable(), self._process_set, advice)
            return grads
        # On a GPU each step would have to copy the parameters to the host.
        is_checked = _core.is_elastic() or _core.checks_replicas(self._process_set.process_set_id)
        return self._call(grads, leaves, advice) if is_checked and _is_on_host() else grads

    def _call(self, grads: Any, leaves: Sequence[tuple[str, Any]], advice: str) -> Any:
        shapes = [f"{name} {leaf.dtype} {leaf.shape}" for name, leaf in leaves]
        # XLA may run the calls of one program in any order: each has a label of its own.
        label = _names.numbered(f"{self._name}.report", tuple(leaf for _, leaf in leaves))
        digest = hashlib.blake2b("\n".join([label, *shapes]).encode(), digest_size=8).digest()
        names = [name.replace("\n", " ") for name, _ in leaves]
        limits = map(str, _replicas.limits())
        lines = [str(int.from_bytes(digest, "little")), *limits, advice, *names]
        _calls.register_for_host(_TARGET)
        report = jax.ffi.ffi_call(
            _TARGET,
            jax.ShapeDtypeStruct((), jnp.float32),  # type: ignore[no-untyped-call,unused-ignore]
            # One call for all; the key is of one model's shapes then.
            vmap_method="expand_dims",
        )
        zero = report(
            *(jax.lax.stop_gradient(leaf) for _, leaf in leaves),
            name="\n".join(lines),
            process_set=np.int32(self._process_set.process_set_id or 0),
        )
        flat, structure = jax.tree.flatten(grads)
        # A gradient may be a number of Python; one without elements does not depend on the call.
        floats = [i for i, leaf in enumerate(flat) if _is_float_array(leaf) and jnp.size(leaf)]
        if not floats:
            return grads
        smallest = min(floats, key=lambda i: jnp.size(flat[i]))
        # A difference, as a sum would make 0.0 of -0.0.
        flat[smallest] = flat[smallest] - zero.astype(flat[smallest].dtype)
        return jax.tree.unflatten(structure, flat)


def _is_float_array(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


def _is_on_host() -> bool:
    return bool(jax.default_backend() == "cpu")
