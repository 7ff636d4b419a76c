"""`DistributedOptimizer`: an optimizer of TensorFlow 1 that uses the reduced gradients of all ranks."""

from __future__ import annotations

import importlib
from typing import Any

import tensorflow as tf

from horovod.common._ops import Adasum, Average
from horovod.common.basics import basics
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.tensorflow._adasum_optimizer import _DistributedAdasumOptimizer
from horovod.tensorflow._autograph import unconverted
from horovod.tensorflow._first_step import AFTER, note_step
from horovod.tensorflow._gradient_reduction import _make_allreduce_grads_fn
from horovod.tensorflow._settings import checked_groups, checked_op
from horovod.tensorflow._variables import key_of
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
from horovod.tensorflow.gradient_aggregation_eager import checked_passes, reduce_shared

__all__ = [
    "DistributedOptimizer",
    "_DistributedAdasumOptimizer",
    "_DistributedOptimizer",
    "_LegacyOptimizer",
]

_LegacyOptimizer: Any = tf.compat.v1.train.Optimizer


class _DistributedOptimizer(_LegacyOptimizer):
    """Computes gradients with the wrapped optimizer, reduces them, and applies them with the wrapped optimizer."""

    def __init__(
        self,
        optimizer: Any,
        name: str | None = None,
        use_locking: bool = False,
        device_dense: str = "",
        device_sparse: str = "",
        compression: Any = Compression.none,
        sparse_as_dense: bool = False,
        op: int = Average,
        gradient_predivide_factor: float = 1.0,
        backward_passes_per_step: int = 1,
        average_aggregated_gradients: bool = False,
        groups: Any = None,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
    ) -> None:
        super().__init__(
            name=name or f"Distributed{type(optimizer).__name__}", use_locking=use_locking
        )
        # The name pairs operations across ranks. It does not contain the class, which may differ between ranks.
        name = name or "DistributedOptimizer"
        self._optimizer = optimizer
        self._process_set = process_set
        self._scale_local_gradients = scale_local_gradients
        self._local_vars: set[Any] = set()
        self._allreduce_grads = _make_allreduce_grads_fn(
            name,
            device_dense,
            device_sparse,
            compression,
            sparse_as_dense,
            op,
            gradient_predivide_factor,
            groups,
            process_set,
        )
        self._agg_helper: LocalGradientAggregationHelper | None = None
        self._passes = checked_passes(backward_passes_per_step)
        if self._passes > 1:
            if tf.executing_eagerly():
                raise ValueError(
                    "backward_passes_per_step > 1 is not yet supported for _LegacyOptimizer with eager execution."
                )
            self._agg_helper = LocalGradientAggregationHelper(
                backward_passes_per_step,
                self._allreduce_grads,
                sparse_as_dense,
                average_aggregated_gradients,
                basics.rank(),
                LocalGradientAggregationHelper._OPTIMIZER_TYPE_LEGACY,
                process_set,
                scale_local_gradients,
                name,
            )

    def register_local_var(self, var: Any) -> None:
        """Exclude the gradient of this variable from the reduction; each rank uses its own."""
        self._local_vars.add(key_of(var))
        if self._agg_helper is not None:
            self._agg_helper.register_local_var(var)

    @unconverted
    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Compute gradients with the wrapped optimizer, and return them reduced."""
        computed = self._optimizer.compute_gradients(*args, **kwargs)
        grads = [grad for grad, _ in computed]
        vars = [var for _, var in computed]
        shared = [var for grad, var in computed if grad is not None]
        shared = [var for var in shared if key_of(var) not in self._local_vars]
        note_step(shared, self._process_set, after=max(AFTER, self._passes))
        if self._agg_helper is not None:
            reduced = self._agg_helper.compute_gradients(grads, vars)
        else:
            reduced = reduce_shared(
                grads,
                vars,
                self._local_vars,
                self._allreduce_grads,
                self._scale_local_gradients,
                self._process_set,
            )
        return list(zip(reduced, vars, strict=True))

    def apply_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """Apply gradients with the wrapped optimizer. Arguments: `(grads_and_vars, global_step=None, name=None)`."""
        if self._agg_helper is None:
            return self._optimizer.apply_gradients(*args, **kwargs)
        if args:
            args = (list(args[0]), *args[1:])
        elif "grads_and_vars" in kwargs:
            kwargs["grads_and_vars"] = list(kwargs["grads_and_vars"])
        return self._agg_helper.apply_gradients(
            lambda: self._optimizer.apply_gradients(*args, **kwargs),
            self._optimizer,
            *args,
            **kwargs,
        )

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """Return a slot of the wrapped optimizer."""
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        """Return the slot names of the wrapped optimizer."""
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        """Return the variables of the wrapped optimizer."""
        return self._optimizer.variables(*args, **kwargs)


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return an optimizer that reduces gradients over all ranks before the given one uses them.

    Parameters
    ----------
    optimizer
        A `tf.compat.v1.train.Optimizer`, in graphs, in eager execution or in `tf.function`; or an optimizer of Keras,
        which `horovod.tensorflow.keras.DistributedOptimizer` wraps.
    name
        Name of the new optimizer; default "Distributed" and the name of its class.
    use_locking
        As in `tf.compat.v1.train.Optimizer`; no effect with Keras.
    device_dense, device_sparse, compression, sparse_as_dense, gradient_predivide_factor
        As in `DistributedGradientTape`.
    num_groups, groups, process_set
        As in `DistributedGradientTape`.
    backward_passes_per_step
        Number of passes whose gradients are summed locally before they are reduced and applied. A v1 optimizer that is
        built in eager execution supports only 1, except with `Adasum`.
    op
        `Average`, `Sum` or, for v1 optimizers, `Adasum`. `Adasum` combines the ranks' weight changes instead of their
        gradients.
    average_aggregated_gradients
        Whether to divide the gradients that were summed over several passes by the number of passes.
    scale_local_gradients
        Whether to divide the gradients of variables given to `register_local_var` by the number of ranks.

    Raises
    ------
    ValueError, NotImplementedError
        The combination of arguments is invalid or not supported.

    Examples
    --------
    >>> optimizer = hvd.DistributedOptimizer(tf.compat.v1.train.AdagradOptimizer(0.01 * hvd.size()))
    >>> train_op = optimizer.minimize(loss, global_step=global_step)
    """
    op = checked_op(op, gradient_predivide_factor, average_aggregated_gradients)
    groups = checked_groups(groups, num_groups)
    if isinstance(optimizer, _LegacyOptimizer):
        if op != Adasum:
            return _DistributedOptimizer(
                optimizer,
                name,
                use_locking,
                device_dense,
                device_sparse,
                compression,
                sparse_as_dense,
                op,
                gradient_predivide_factor,
                backward_passes_per_step,
                average_aggregated_gradients,
                groups,
                process_set,
                scale_local_gradients,
            )
        if process_set.process_set_id != 0:
            raise NotImplementedError("Adasum does not support process sets yet")
        return _DistributedAdasumOptimizer(
            optimizer,
            name,
            use_locking,
            device_dense,
            device_sparse,
            compression,
            backward_passes_per_step,
        )
    if op == Adasum:
        raise ValueError("op == Adasum is not supported yet with Keras")
    # Imported late, because this module imports Keras.
    keras: Any = importlib.import_module("horovod.tensorflow.keras")
    return keras.DistributedOptimizer(
        optimizer,
        name=name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
