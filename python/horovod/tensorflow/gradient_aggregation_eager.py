"""Sums the gradients of several backward passes locally before the reduction, for optimizers that are built eagerly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.tensorflow._allreduce import divided_by_size
from horovod.tensorflow._autograph import unconverted
from horovod.tensorflow._variables import key_of, tf_variable

__all__ = ["LocalGradientAggregationHelperEager"]

NO_SLICES = "IndexedSlices are not supported when `backward_passes_per_step` > 1 and `sparse_as_dense` is False."


def checked_passes(backward_passes_per_step: int) -> int:
    """Return the number of passes; raise ValueError if it is not positive."""
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    return backward_passes_per_step


def dense(gradient: Any, sparse_as_dense: bool) -> Any:
    """Return the gradient as a dense tensor; raise ValueError for slices without `sparse_as_dense`."""
    if isinstance(gradient, tf.IndexedSlices):
        if not sparse_as_dense:
            raise ValueError(NO_SLICES)
        return tf.convert_to_tensor(gradient)
    return gradient


def reduce_shared(
    grads: Sequence[Any],
    vars: Sequence[Any],
    local: set[Any],
    allreduce_func: Callable[..., Sequence[Any]],
    scale_local_gradients: bool,
    process_set: ProcessSet,
) -> list[Any]:
    """Return the gradients, reduced for all but local variables.

    With `scale_local_gradients`, the gradients of local variables are divided by the number of ranks.
    """
    results = list(grads)
    shared = [i for i, var in enumerate(vars) if not local or key_of(var) not in local]
    reduced = allreduce_func([grads[i] for i in shared], [vars[i] for i in shared])
    for i, grad in zip(shared, reduced, strict=True):
        results[i] = grad
    if scale_local_gradients:
        for i in set(range(len(results))).difference(shared):
            if results[i] is not None:
                results[i] = divided_by_size(results[i], process_set)
    return results


class LocalGradientAggregationHelperEager:
    """Sums gradients in variables, and reduces them at every N-th call; works eagerly and in `tf.function`.

    Parameters
    ----------
    backward_passes_per_step
        The number N of calls for one reduction.
    allreduce_func
        `f(grads, vars)`, which returns the reduced gradients.
    sparse_as_dense
        Whether to convert `tf.IndexedSlices` to dense tensors; otherwise slices raise an error.
    average_aggregated_gradients
        Whether to divide the reduced gradients by N.
    process_set
        The ranks by whose number gradients of local variables are divided.
    scale_local_gradients
        Whether gradients of local variables are divided by the number of ranks.

    Raises
    ------
    ValueError
        N is not positive.
    """

    def __init__(
        self,
        backward_passes_per_step: int,
        allreduce_func: Callable[..., Sequence[Any]],
        sparse_as_dense: bool,
        average_aggregated_gradients: bool,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
    ) -> None:
        self.backward_passes_per_step = checked_passes(backward_passes_per_step)
        self.allreduce_grads = allreduce_func
        self.sparse_as_dense = sparse_as_dense
        self.average_aggregated_gradients = average_aggregated_gradients
        self.process_set = process_set
        self.scale_local_gradients = scale_local_gradients
        self.locally_aggregated_grads: dict[int, Any] = {}
        self._local_vars: set[Any] = set()
        with tf.init_scope():
            self.counter = tf.Variable(0, trainable=False, dtype=tf.int32)

    def register_local_var(self, var: Any) -> None:
        """Exclude the gradient of this variable from the reduction; each rank uses its own."""
        self._local_vars.add(key_of(var))

    @unconverted
    def reset(self) -> None:
        """Set the sums to zero and begin a new cycle."""
        self.counter.assign(0)
        for total in self.locally_aggregated_grads.values():
            total.assign(tf.zeros_like(total))

    @unconverted
    def compute_gradients(self, grads: Sequence[Any], vars: Sequence[Any]) -> list[Any]:
        """Add the gradients to the sums; return the reduced sums at every N-th call, and the local sums otherwise.

        A gradient that is None adds nothing. A gradient that is None in all passes stays None.
        """
        given = [dense(grad, self.sparse_as_dense) for grad in grads]
        self._make_totals(given, vars)
        for i, grad in enumerate(given):
            if grad is not None:
                self.locally_aggregated_grads[i].assign_add(grad)
        self.counter.assign_add(1)
        there = sorted(i for i in self.locally_aggregated_grads if i < len(given))
        totals = [tf.convert_to_tensor(self.locally_aggregated_grads[i]) for i in there]

        def reduced() -> list[Any]:
            own = [vars[i] for i in there]
            results = reduce_shared(
                totals,
                own,
                self._local_vars,
                self.allreduce_grads,
                self.scale_local_gradients,
                self.process_set,
            )
            if self.average_aggregated_gradients:
                results = [grad / self.backward_passes_per_step for grad in results]
            # The control dependency makes graphs read the sums before they are cleared.
            with tf.control_dependencies(results):
                self.reset()
            return [tf.identity(grad) for grad in results]

        is_last = tf.equal(self.counter, self.backward_passes_per_step)
        combined = tf.cond(is_last, reduced, lambda: [tf.identity(total) for total in totals])
        results: list[Any] = [None] * len(given)
        for i, grad in zip(there, combined, strict=True):
            results[i] = grad
        return results

    @unconverted
    def apply_gradients(
        self,
        apply_grads_closure: Callable[[], Any],
        optimizer: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call the closure in every N-th pass; other passes only increment `optimizer.iterations`."""
        del args, kwargs

        def apply() -> Any:
            apply_grads_closure()
            return tf.constant(True)

        def count() -> Any:
            optimizer.iterations.assign_add(1)
            return tf.constant(False)

        return tf.cond(tf.equal(self.counter, 0), apply, count)

    def _make_totals(self, grads: Sequence[Any], vars: Sequence[Any]) -> None:
        for i, (grad, var) in enumerate(zip(grads, vars, strict=True)):
            if grad is None or i in self.locally_aggregated_grads:
                continue
            shape = grad.shape if grad.shape.is_fully_defined() else tf_variable(var).shape
            with tf.init_scope():
                total = tf.Variable(tf.zeros(shape, grad.dtype), trainable=False)
            self.locally_aggregated_grads[i] = total
