"""Mixin for optimizers of Keras 2 (`tf_keras`): reduces gradients in the methods that compute them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

import horovod.tensorflow as hvd
from horovod._keras._adoption import adopted, is_set_by_config
from horovod._keras._reduction import GradientReduction
from horovod.common._gradient_sums import SumsGradients
from horovod.common.basics import basics
from horovod.tensorflow._variables import key_of
from horovod.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
from horovod.tensorflow.gradient_aggregation_eager import (
    LocalGradientAggregationHelperEager,
    reduce_shared,
)


class DistributedKeras2(SumsGradients):
    """Mixin for the class of a wrapped optimizer of Keras 2.

    Gradients that a script computes and passes to `apply_gradients` are not reduced. Such scripts use
    `DistributedGradientTape`.
    """

    _hvd: GradientReduction
    _hvd_devices: tuple[str, str]
    _HAS_AGGREGATE_GRAD = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._hvd_begin()

    def _hvd_begin(self) -> None:
        """Set up the reduction of gradients."""
        how = self._hvd
        # Written to `__dict__`: TensorFlow would track assigned attributes and save them with the optimizer.
        own = self.__dict__
        own["_hvd_local"] = set()
        own["_hvd_allreduce"] = hvd._make_allreduce_grads_fn(
            how.name,
            *self._hvd_devices,
            how.compression,
            how.sparse_as_dense,
            how.op,
            how.gradient_predivide_factor,
            how.groups,
            how.process_set,
        )
        own["_hvd_helper"] = self._hvd_make_helper() if how.passes > 1 else None

    def _hvd_make_helper(self) -> Any:
        how, allreduce = self._hvd, self.__dict__["_hvd_allreduce"]
        options = (how.passes, allreduce, how.sparse_as_dense, how.average_aggregated)
        if tf.executing_eagerly():
            return LocalGradientAggregationHelperEager(
                *options, how.process_set, how.scale_local_gradients
            )
        return LocalGradientAggregationHelper(
            *options,
            basics.rank(),
            LocalGradientAggregationHelper._OPTIMIZER_TYPE_KERAS,
            how.process_set,
            how.scale_local_gradients,
            how.name,
        )

    @property
    def process_set(self) -> Any:
        """Return the process set whose ranks take part."""
        return self._hvd.process_set

    def register_local_var(self, var: Any) -> None:
        """Exclude the gradients of a variable from the reduction."""
        self.__dict__["_hvd_local"].add(key_of(var))
        helper = self.__dict__["_hvd_helper"]
        if helper is not None:
            helper.register_local_var(var)

    def _hvd_forget_gradients(self) -> None:
        """Clear the sums of eager execution; the elastic state clears those of a graph in its session."""
        helper = self.__dict__["_hvd_helper"]
        if isinstance(helper, LocalGradientAggregationHelperEager):
            helper.reset()

    # ---- where gradients are computed --------------------------------------------------------------------------

    def compute_gradients(
        self, loss: Any, var_list: Any, tape: Any = None
    ) -> list[tuple[Any, Any]]:
        """Return the reduced gradients. Only new optimizers define this method; for legacy ones it is an alias."""
        if not hasattr(super(), "compute_gradients"):
            return self._compute_gradients(loss, var_list, tape=tape)
        return self._hvd_reduced(super().compute_gradients(loss, var_list, tape=tape))  # type: ignore[misc]

    def _compute_gradients(
        self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None
    ) -> list[tuple[Any, Any]]:
        """Return the reduced gradients. Only legacy optimizers define this method; for new ones it is an alias."""
        if not hasattr(super(), "_compute_gradients"):
            if grad_loss is not None:
                raise TypeError(
                    f"{type(self).__name__} of Keras 2 takes no grad_loss, which legacy optimizers take. Multiply the "
                    "loss by it, and call compute_gradients(loss, var_list, tape=tape)."
                )
            return self.compute_gradients(loss, var_list, tape=tape)
        computed = super()._compute_gradients(loss, var_list, grad_loss=grad_loss, tape=tape)  # type: ignore[misc]
        return self._hvd_reduced(computed)

    def get_gradients(self, loss: Any, params: Any) -> list[Any]:
        """Return the reduced gradients in graphs of TensorFlow 1 style."""
        gradients: Sequence[Any] = super().get_gradients(loss, params)  # type: ignore[misc]
        return self._hvd_reduce(gradients, params)

    def apply_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """Apply the gradients with the wrapped class; with n passes per step, only in every n-th call."""
        helper = self.__dict__["_hvd_helper"]
        update = super().apply_gradients  # type: ignore[misc]
        if helper is None:
            return update(*args, **kwargs)
        if args:
            args = (list(args[0]), *args[1:])
        else:
            kwargs["grads_and_vars"] = list(kwargs["grads_and_vars"])
        return helper.apply_gradients(lambda: update(*args, **kwargs), self, *args, **kwargs)

    def _hvd_reduced(self, computed: Any) -> list[tuple[Any, Any]]:
        pairs = list(computed)
        variables = [variable for _, variable in pairs]
        reduced = self._hvd_reduce([gradient for gradient, _ in pairs], variables)
        return list(zip(reduced, variables, strict=True))

    def _hvd_reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        own, how = self.__dict__, self._hvd
        if own["_hvd_helper"] is not None:
            summed: list[Any] = own["_hvd_helper"].compute_gradients(gradients, variables)
            return summed
        return reduce_shared(
            gradients,
            variables,
            own["_hvd_local"],
            own["_hvd_allreduce"],
            how.scale_local_gradients,
            how.process_set,
        )


def distributed_keras2(
    optimizer: Any, reduction: GradientReduction, dense: str, sparse: str
) -> Any:
    """Return an optimizer like the given one, of a subclass of its class.

    For a loss-scaling optimizer, return one of the same class around a distributed inner optimizer.
    """
    kind = type(optimizer)
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None and hasattr(optimizer, "dynamic_growth_steps"):
        config = {"dynamic": optimizer.dynamic, "initial_scale": optimizer.initial_scale}
        if optimizer.dynamic:
            config["dynamic_growth_steps"] = optimizer.dynamic_growth_steps
        return kind(distributed_keras2(inner, reduction, dense, sparse), **config)
    attributes = {
        "_hvd": reduction,
        "_hvd_devices": (dense, sparse),
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
    }
    made: Any = type(kind.__name__, (DistributedKeras2, kind), attributes)
    if not is_set_by_config(optimizer):
        return adopted(made, optimizer)
    result = made.from_config(optimizer.get_config())
    for attribute in ("_exclude_from_weight_decay", "_exclude_from_weight_decay_names"):
        if hasattr(optimizer, attribute):
            setattr(result, attribute, getattr(optimizer, attribute))
    return result
