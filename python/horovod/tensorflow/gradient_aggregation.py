"""Sums the gradients of several backward passes locally before the reduction, in graphs that a session runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.tensorflow._autograph import unconverted
from horovod.tensorflow._variables import key_of, tf_variable
from horovod.tensorflow.gradient_aggregation_eager import checked_passes, dense, reduce_shared

__all__ = ["LocalGradientAggregationHelper"]

# Name of the graph collection that contains the sums and the counters of all optimizers of the graph.
AGGREGATING_COLLECTION = "aggregating_collection"


class LocalGradientAggregationHelper:
    """Sums gradients in local variables, and reduces them in every N-th run of the graph.

    The variables are in the collections `LOCAL_VARIABLES` and "aggregating_collection". The local initializer therefore
    initializes them, and checkpoints do not contain them. `MonitoredTrainingSession` runs the local initializer.

    Parameters
    ----------
    backward_passes_per_step
        The number N of runs for one reduction.
    allreduce_func
        `f(grads, vars)`, which returns the reduced gradients.
    sparse_as_dense
        Whether to convert `tf.IndexedSlices` to dense tensors; otherwise slices raise an error.
    average_aggregated_gradients
        Whether to divide the reduced gradients by N.
    rank
        Part of the variables' scope.
    optimizer_type
        `_OPTIMIZER_TYPE_KERAS` or `_OPTIMIZER_TYPE_LEGACY`; accepted without effect.
    process_set
        The ranks by whose number gradients of local variables are divided.
    scale_local_gradients
        Whether gradients of local variables are divided by the number of ranks.
    name
        Part of the variables' scope.

    Raises
    ------
    ValueError
        N is not positive.
    """

    _OPTIMIZER_TYPE_KERAS = "optimizer_type_keras"
    _OPTIMIZER_TYPE_LEGACY = "optimizer_type_legacy"

    def __init__(
        self,
        backward_passes_per_step: int,
        allreduce_func: Callable[..., Sequence[Any]],
        sparse_as_dense: bool,
        average_aggregated_gradients: bool,
        rank: int,
        optimizer_type: str = _OPTIMIZER_TYPE_LEGACY,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
        name: str = "",
    ) -> None:
        del optimizer_type
        self.backward_passes_per_step = checked_passes(backward_passes_per_step)
        self._allreduce_grads = allreduce_func
        self.sparse_as_dense = sparse_as_dense
        self.average_aggregated_gradients = average_aggregated_gradients
        self.rank = rank
        self.process_set = process_set
        self.scale_local_gradients = scale_local_gradients
        self.name = name
        self.counter: Any = None
        self.locally_aggregated_grads: list[Any] = []
        self._local_vars: set[Any] = set()

    def register_local_var(self, var: Any) -> None:
        """Exclude the gradient of this variable from the reduction; each rank uses its own."""
        self._local_vars.add(key_of(var))

    @unconverted
    def compute_gradients(self, grads: Sequence[Any], vars: Sequence[Any]) -> list[Any]:
        """Add the gradients to the sums; return the reduced sums in every N-th run, and the given gradients otherwise.

        Gradients that are None stay None.
        """
        results: list[Any] = [dense(grad, self.sparse_as_dense) for grad in grads]
        there = [i for i, grad in enumerate(results) if grad is not None]
        given = [results[i] for i in there]
        own = [vars[i] for i in there]
        self._make_variables(given, own)
        with tf.control_dependencies([self._clear_at_start()]):
            totals = self.locally_aggregated_grads
            added = [t.assign_add(g) for t, g in zip(totals, given, strict=True)]
        with tf.control_dependencies(_ops(added)):
            counted = self.counter.assign_add(1)
        with tf.control_dependencies(_ops([counted])):
            is_last = tf.equal(self.counter.read_value(), self.backward_passes_per_step)
            combined = tf.cond(
                is_last, lambda: self._reduced(own), lambda: [tf.identity(grad) for grad in given]
            )
        # If the branches have one result, `tf.cond` returns it without a list.
        combined = combined if isinstance(combined, (list, tuple)) else [combined]
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
        """Run the closure's operations in every N-th run; other runs only count the global step and `iterations`."""
        grads_and_vars = list(args[0] if args else kwargs.get("grads_and_vars", []))
        global_step = args[1] if len(args) > 1 else kwargs.get("global_step")

        def apply() -> Any:
            with tf.control_dependencies(_ops([apply_grads_closure()])):
                return tf.constant(True)

        def count() -> Any:
            counters = [global_step, getattr(optimizer, "iterations", None)]
            counted = [c.assign_add(1) for c in counters if c is not None]
            with tf.control_dependencies(_ops(counted)):
                return tf.constant(False)

        # The counter is read after all gradients of this run are computed.
        with tf.control_dependencies([grad for grad, _ in grads_and_vars if grad is not None]):
            starts_anew = tf.equal(self.counter.read_value(), 0)
        applied = tf.cond(starts_anew, apply, count)
        return tf.group(applied)

    def _make_variables(self, grads: Sequence[Any], vars: Sequence[Any]) -> None:
        if self.counter is not None:
            return
        collections = [tf.compat.v1.GraphKeys.LOCAL_VARIABLES, AGGREGATING_COLLECTION]
        options: dict[str, Any] = {
            "trainable": False,
            "collections": collections,
            "use_resource": True,
        }
        scope = f"aggregation_variables_{self.name}{self.rank}"
        with tf.compat.v1.variable_scope(scope, reuse=tf.compat.v1.AUTO_REUSE):
            self.counter = tf.compat.v1.get_variable(
                "aggregation_counter",
                shape=(),
                dtype=tf.int32,
                initializer=tf.compat.v1.zeros_initializer(),
                **options,
            )
            for i, (grad, var) in enumerate(zip(grads, vars, strict=True)):
                shape = grad.shape if grad.shape.is_fully_defined() else tf_variable(var).shape
                total = tf.compat.v1.get_variable(
                    f"aggregation_{i}_{_scope_name(var)}",
                    shape=shape,
                    dtype=grad.dtype,
                    initializer=tf.compat.v1.zeros_initializer(),
                    **options,
                )
                self.locally_aggregated_grads.append(total)

    def _clear_at_start(self) -> Any:
        def clear() -> Any:
            cleared = [t.assign(tf.zeros_like(t)) for t in self.locally_aggregated_grads]
            with tf.control_dependencies(_ops(cleared)):
                return tf.constant(True)

        starts_anew = tf.equal(self.counter.read_value(), 0)
        return _ops([tf.cond(starts_anew, clear, lambda: tf.constant(False))])[0]

    def _reduced(self, vars: Sequence[Any]) -> list[Any]:
        results = reduce_shared(
            [total.read_value() for total in self.locally_aggregated_grads],
            vars,
            self._local_vars,
            self._allreduce_grads,
            self.scale_local_gradients,
            self.process_set,
        )
        if self.average_aggregated_gradients:
            results = [grad / self.backward_passes_per_step for grad in results]
        with tf.control_dependencies(results):
            begun = self.counter.assign(0)
        with tf.control_dependencies(_ops([begun])):
            return [tf.identity(grad) for grad in results]


def _scope_name(var: Any) -> str:
    return str(tf_variable(var).name).split(":")[0].replace("/", "_")


def _ops(results: Sequence[Any]) -> list[Any]:
    """Return the results that can be control dependencies: some assignments return None in eager execution."""
    return [result for result in results if result is not None]
