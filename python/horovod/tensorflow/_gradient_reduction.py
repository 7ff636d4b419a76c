"""Reduces a list of gradients: chooses the groups and names, and whether this process takes part."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import tensorflow as tf

from horovod import _core
from horovod.common._gradient_grouping import fills_its_host
from horovod.common._reduction import Reduction
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.util import split_list
from horovod.tensorflow import _xla, mpi_ops
from horovod.tensorflow._allreduce import allreduce, grouped_allreduce
from horovod.tensorflow._autograph import unconverted
from horovod.tensorflow._operations import _set_id
from horovod.tensorflow._variables import key_of, slices_as_dense

__all__ = ["_make_allreduce_grads_fn", "takes_part"]

# `f(grads, vars=None, use_generic_names=False)` returns the reduced gradients in the same order.
AllreduceGrads = Callable[..., list[Any]]


def takes_part(process_set: ProcessSet) -> Any:
    """Return whether this process reduces with other processes.

    For process sets of elastic jobs the result is a tensor, because members may change between runs of a graph.
    """
    if _core.is_elastic():
        if process_set.process_set_id == 0:
            return True
        included = mpi_ops.process_set_included_op(_set_id(process_set))
        size = mpi_ops.size_op(_set_id(process_set))
        return tf.logical_and(tf.equal(included, 1), size > 1)
    return bool(process_set.included()) and (process_set.size() or 1) > 1


def _make_allreduce_grads_fn(
    name: str,
    device_dense: str,
    device_sparse: str,
    compression: Any,
    sparse_as_dense: bool,
    op: int,
    gradient_predivide_factor: float,
    groups: int | Sequence[Sequence[Any]] | None,
    process_set: ProcessSet = global_process_set,
) -> AllreduceGrads:
    """Return `f(grads, vars=None, use_generic_names=False)`, which reduces a list of gradients.

    Gradients that are None stay None. Without groups each gradient is sent as soon as it is computed. In three cases
    that has no advantage, and all gradients of one dtype are one operation: in eager execution, where all of them exist
    at the call; in graphs that XLA compiles; and where ranks use all cores (`fills_its_host`).

    Parameters
    ----------
    name
        Prefix of the name scope of the operations.
    groups
        Number of groups of about equal length, or the variables of each group. The gradients of a group are reduced
        together. With lists of variables, `vars` is required.

    The other parameters are those of `DistributedGradientTape`.
    """
    reduction = Reduction.of_gradients(op, gradient_predivide_factor, process_set)
    keys: int | list[list[Hashable]] | None
    if groups is None or isinstance(groups, int):
        keys = groups
    else:
        keys = [[key_of(var) for var in group] for group in groups]

    def reduce_unit(
        grads: Sequence[Any], name: str | None, alone: bool, generic: bool
    ) -> list[Any]:
        has_dense = any(not isinstance(grad, tf.IndexedSlices) for grad in grads)
        how = reduction if has_dense else Reduction(op, process_set=process_set)
        options: dict[str, Any] = {
            "device_dense": device_dense,
            "device_sparse": device_sparse,
            "compression": compression,
            "name": name,
            "ignore_name_scope": generic,
            **how._asdict(),
        }
        if alone:
            return [allreduce(grads[0], **options)]
        return list(grouped_allreduce(grads, **options))

    def reduce(
        grads: list[Any], units: list[list[int]], places: Sequence[int] | None, generic: bool
    ) -> list[Any]:
        """Reduce each unit of gradients and return all results.

        `places` are given if gradients are reduced one by one: their positions in the list that includes None.
        """
        results, alone = list(grads), places is not None
        for number, unit in enumerate(units):
            # Numbers replace the gradients' names, which contain layer names. The counters in layer names include all
            # layers of the process, and ranks may have made different layers.
            name = f"grad_{number if places is None else places[number]}"
            if not generic:
                kind = "HorovodGroupedAllreduce_grads"
                name = f"HorovodAllreduce_{name}" if alone else f"{kind}_{number}"
            reduced = reduce_unit([grads[i] for i in unit], name, alone, generic)
            for i, grad in zip(unit, reduced, strict=True):
                results[i] = grad
        return results

    @unconverted
    def allreduce_grads(
        grads: Sequence[Any], vars: Sequence[Any] | None = None, use_generic_names: bool = False
    ) -> list[Any]:
        with tf.name_scope(f"{name}_Allreduce"):
            every = [slices_as_dense(g) if sparse_as_dense else g for g in grads]
            there = [i for i, grad in enumerate(every) if grad is not None]
            condition = takes_part(process_set)
            if condition is False or not there:
                return every
            given = [every[i] for i in there]
            together = tf.executing_eagerly() or _xla.is_compiling() or fills_its_host()
            alone = keys is None and not together
            units = _units(given, [vars[i] for i in there] if vars else None, keys, alone)
            places = there if alone else None
            if condition is True:
                reduced = reduce(given, units, places, use_generic_names)
            else:
                with tf.device("/cpu:0"):
                    condition = tf.identity(condition)
                reduced = tf.cond(
                    condition,
                    lambda: reduce(given, units, places, use_generic_names),
                    lambda: [_identity(grad) for grad in given],
                )
            for i, grad in zip(there, reduced, strict=True):
                every[i] = grad
            return every

    return allreduce_grads


def _identity(grad: Any) -> Any:
    return tf.nest.map_structure(tf.identity, grad, expand_composites=True)


def _units(
    grads: Sequence[Any],
    vars: Sequence[Any] | None,
    groups: int | list[list[Hashable]] | None,
    alone: bool,
) -> list[list[int]]:
    """Return the positions of the gradients of each operation; those of one operation have one kind and dtype."""
    positions = list(range(len(grads)))
    if alone:
        return [[i] for i in positions]
    if groups is None:
        wanted: list[Sequence[int]] = [positions]
    elif isinstance(groups, int):
        wanted = split_list(positions, min(groups, len(positions)))
    else:
        if vars is None:
            raise ValueError(
                "groups is a list of lists of variables, so the variables have to be given beside the gradients."
            )
        number = {key: n for n, group in enumerate(groups) for key in group}
        found: dict[Hashable, list[int]] = {}
        for i, var in enumerate(vars):
            key = key_of(var)
            # A variable without a group is a group of its own.
            found.setdefault(number.get(key, key), []).append(i)
        wanted = list(found.values())
    return [unit for group in wanted for unit in _by_kind(grads, group)]


def _by_kind(grads: Sequence[Any], positions: Sequence[int]) -> list[list[int]]:
    units: dict[Hashable, list[int]] = {}
    for i in positions:
        units.setdefault((isinstance(grads[i], tf.IndexedSlices), grads[i].dtype), []).append(i)
    return list(units.values())
