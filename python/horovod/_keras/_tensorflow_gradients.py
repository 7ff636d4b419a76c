"""Reduces the gradients of Keras 3 on TensorFlow: in `tf.function`, compiled or not, and in eager execution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

import horovod.tensorflow as hvd
from horovod._keras._reduction import GradientReduction
from horovod.tensorflow._allreduce import divided_by_size
from horovod.tensorflow.gradient_aggregation_eager import dense

_NOT_STATELESS = "Keras on TensorFlow keeps its state in variables: use apply."


class TensorFlowGradients:
    """Reduces and sums one optimizer's gradients."""

    def __init__(self, reduction: GradientReduction) -> None:
        self._reduction = reduction
        self._allreduce = hvd._make_allreduce_grads_fn(
            reduction.name,
            "",
            "",
            reduction.compression,
            reduction.sparse_as_dense,
            reduction.op,
            reduction.gradient_predivide_factor,
            reduction.groups,
            reduction.process_set,
        )
        self._sums: dict[int, Any] = {}
        self._count: Any = None

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the reduced gradients; slices stay slices unless `sparse_as_dense` is set."""
        how = self._reduction
        result = list(gradients)
        shared = [i for i, variable in enumerate(variables) if not how.is_local(variable)]
        reduced = self._allreduce([result[i] for i in shared], [variables[i] for i in shared])
        for i, gradient in zip(shared, reduced, strict=True):
            result[i] = gradient
        if how.scale_local_gradients and how.is_active():
            for i in set(range(len(result))).difference(shared):
                if result[i] is not None:
                    result[i] = divided_by_size(result[i], how.process_set)
        return result

    def build(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Make the variables for the sums; they are not among the optimizer's variables."""
        with tf.init_scope():
            self._count = tf.Variable(0, dtype=tf.int32, trainable=False)
            self._sums = {
                id(variable): tf.Variable(tf.zeros(variable.shape, variable.dtype), trainable=False)
                for variable in variables
            }

    def own_variables(self) -> list[Any]:
        """Return an empty list: the variables for sums are not among the optimizer's variables."""
        return []

    def aggregate(
        self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any], update: Any
    ) -> None:
        """Add the gradients to the sums; every n-th call reduces the sums and calls `update`."""
        how = self._reduction
        there = [i for i, gradient in enumerate(gradients) if gradient is not None]
        sums = {i: self._sums[id(variables[i])] for i in there}
        for i, total in sums.items():
            total.assign_add(tf.cast(dense(gradients[i], how.sparse_as_dense), total.dtype))
        self._count.assign_add(1)

        def step() -> Any:
            totals: list[Any] = [None] * len(gradients)
            for i, total in sums.items():
                totals[i] = tf.identity(total)
            reduced = self.reduce(totals, variables)
            if how.average_aggregated:
                reduced = [None if g is None else g / how.passes for g in reduced]
            update(reduced)
            self.reset()
            return tf.constant(True)

        tf.cond(tf.equal(self._count, how.passes), step, lambda: tf.constant(False))

    def apply_without_state(self, *_: Any) -> Any:
        """Raise NotImplementedError: this backend has no stateless steps."""
        raise NotImplementedError(_NOT_STATELESS)

    def agree(self, is_finite: Any) -> Any:
        """Return whether `is_finite` is true on all ranks."""
        how = self._reduction
        if not how.is_active():
            return is_finite
        flag = tf.cast(is_finite, tf.float32)
        everyone = hvd.allreduce(
            flag, op=hvd.Min, name=f"{how.name}_finite", process_set=how.process_set
        )
        return everyone > 0

    def reset(self) -> None:
        """Set the sums and their counter to zero."""
        if self._count is None:
            return
        self._count.assign(0)
        for total in self._sums.values():
            total.assign(tf.zeros_like(total))
