"""The Adasum delta optimizer: every rank takes its own steps, and Adasum combines the ranks' weight changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod.common._ops import Adasum
from horovod.common.process_sets import global_process_set
from horovod.tensorflow._allreduce import allreduce
from horovod.tensorflow._autograph import unconverted
from horovod.tensorflow._first_step import note_step
from horovod.tensorflow._gradient_reduction import takes_part
from horovod.tensorflow._variables import key_of
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.gradient_aggregation_eager import checked_passes

_START = "delta_start"


class _DistributedAdasumOptimizer(tf.compat.v1.train.Optimizer):
    """Combines weight changes instead of gradients.

    In each call of `apply_gradients` the wrapped optimizer updates the variables with this rank's gradients. Every N-th
    call reduces the changes since the last combination with Adasum, and adds the result to the values that the
    variables had then. For N > 1 the slots "delta_start" store these values, and the variable "step_count" counts the
    calls.
    """

    def __init__(
        self,
        optimizer: Any,
        name: str | None = None,
        use_locking: bool = False,
        device_dense: str = "",
        device_sparse: str = "",
        compression: Any = Compression.none,
        backward_passes_per_step: int = 1,
    ) -> None:
        super().__init__(
            name=name or f"DistributedDelta{type(optimizer).__name__}", use_locking=use_locking
        )
        # The scope pairs operations across ranks. It does not contain the class, which may differ between ranks.
        self._scope = f"{name or 'DistributedDeltaOptimizer'}_Allreduce"
        self._optimizer = optimizer
        self._device_dense = device_dense
        self._device_sparse = device_sparse
        self._compression = compression
        self._passes = checked_passes(backward_passes_per_step)
        self._step_count: Any = None
        self._starts: dict[Any, Any] = {}

    def compute_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """Return the gradients of the wrapped optimizer, which are not reduced."""
        return self._optimizer.compute_gradients(*args, **kwargs)

    @unconverted
    def apply_gradients(
        self, grads_and_vars: Any, global_step: Any = None, name: str | None = None
    ) -> Any:
        """Take a local step; every N-th call also combines the ranks' weight changes."""
        grads_and_vars = list(grads_and_vars)
        moved = [var for grad, var in grads_and_vars if grad is not None]

        def take_step() -> Any:
            return self._optimizer.apply_gradients(grads_and_vars, global_step, name)

        # Between two reductions the ranks take different steps, so the report waits for one combination.
        note_step(moved, global_process_set, after=self._passes)
        with tf.name_scope(self._scope):
            if self._passes == 1:
                starts = [_copy(var) for var in moved]
                with tf.control_dependencies(starts):
                    stepped = take_step()
                with tf.control_dependencies(_ops([stepped])):
                    return _assigned(moved, self._combined(_read(moved), starts))
            return self._step_of_several(moved, take_step)

    def get_slot(self, var: Any, name: str) -> Any:
        """Return a slot of the wrapped optimizer, or "delta_start"."""
        if name == _START:
            return self._starts.get(key_of(var))
        return self._optimizer.get_slot(var, name)

    def get_slot_names(self) -> list[str]:
        """Return the slot names of the wrapped optimizer, and "delta_start" if it is used."""
        own = [_START] if self._passes > 1 else []
        return [*self._optimizer.get_slot_names(), *own]

    def variables(self) -> list[Any]:
        """Return the variables of the wrapped optimizer, and those of this object."""
        own = [] if self._step_count is None else [self._step_count]
        return [*self._optimizer.variables(), *own, *self._starts.values()]

    def _step_of_several(self, moved: Sequence[Any], take_step: Any) -> Any:
        self._make_variables(moved)
        starts = [self._starts[key_of(var)] for var in moved]

        def remember() -> Any:
            kept = [start.assign(_copy(var)) for start, var in zip(starts, moved, strict=True)]
            with tf.control_dependencies(_ops(kept)):
                return tf.constant(True)

        begins = tf.equal(self._step_count.read_value() % self._passes, 0)
        remembered = tf.cond(begins, remember, lambda: tf.constant(False))
        with tf.control_dependencies([remembered]):
            stepped = take_step()
        with tf.control_dependencies(_ops([stepped])):
            counted = self._step_count.assign_add(1)
        with tf.control_dependencies(_ops([counted])):
            ends = tf.equal(self._step_count.read_value() % self._passes, 0)
            values, begun = _read(moved), _read(starts)
            # The assignment is outside of the condition, in which a reference variable cannot be assigned.
            combined = tf.cond(
                ends,
                lambda: self._combined(values, begun),
                lambda: [tf.identity(value) for value in values],
            )
            combined = combined if isinstance(combined, (list, tuple)) else [combined]
            return _assigned(moved, combined)

    def _combined(self, values: Sequence[Any], starts: Sequence[Any]) -> list[Any]:
        """Return the values of the variables after the weight changes of all ranks are combined."""
        if takes_part(global_process_set) is False:
            return [tf.identity(value) for value in values]
        deltas = [value - start for value, start in zip(values, starts, strict=True)]
        combined = [
            allreduce(
                delta,
                device_dense=self._device_dense,
                device_sparse=self._device_sparse,
                compression=self._compression,
                op=Adasum,
                name=f"HorovodAllreduce_deltas_{position}",
            )
            for position, delta in enumerate(deltas)
        ]
        return [start + delta for start, delta in zip(starts, combined, strict=True)]

    def _make_variables(self, moved: Sequence[Any]) -> None:
        with tf.init_scope():
            if self._step_count is None:
                self._step_count = tf.compat.v1.Variable(
                    0, dtype=tf.int64, trainable=False, name="step_count", use_resource=True
                )
            for var in moved:
                if key_of(var) not in self._starts:
                    self._starts[key_of(var)] = tf.compat.v1.Variable(
                        tf.zeros(var.shape, var.dtype.base_dtype),
                        trainable=False,
                        name=_START,
                        use_resource=True,
                    )


def _copy(var: Any) -> Any:
    """Return the variable's value in other memory; reading a reference variable returns the variable's own memory."""
    value = var.read_value()
    is_resource = var.dtype == var.dtype.base_dtype
    return tf.identity(value) if is_resource else tf.raw_ops.DeepCopy(x=value)


def _read(variables: Sequence[Any]) -> list[Any]:
    return [variable.read_value() for variable in variables]


def _assigned(variables: Sequence[Any], values: Sequence[Any]) -> Any:
    """Assign the values; return the grouped operation in graphs, and None in eager execution."""
    pairs = zip(variables, values, strict=True)
    return tf.group(*_ops([variable.assign(value) for variable, value in pairs]))


def _ops(results: Sequence[Any]) -> list[Any]:
    return [result for result in results if result is not None]
