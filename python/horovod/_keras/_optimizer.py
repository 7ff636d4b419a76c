"""`create_distributed_optimizer`: makes a distributed optimizer, whose class derives from the optimizer's own."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from typing import Any

from horovod._keras._adoption import adopted, is_set_by_config
from horovod._keras._first_step import report_first_steps
from horovod._keras._generation import is_keras2_optimizer, is_keras3_optimizer
from horovod._keras._keras3_optimizer import (
    DistributedKeras3,
    distributed_class,
    wrap_loss_scaling,
)
from horovod._keras._reduction import DEFAULT_NAME, GradientReduction, check_options, checked_groups
from horovod.common._ops import Average, resolve_op
from horovod.common.process_sets import ProcessSet, global_process_set

# Attributes that methods set, not constructor arguments. An optimizer's configuration does not contain them.
_SET_BY_CALLS = (
    "_exclude_from_weight_decay",
    "_exclude_from_weight_decay_pattern",
    "_exclude_from_weight_decay_names",
)


def create_distributed_optimizer(
    keras: Any,
    optimizer: Any,
    name: str | None,
    device_dense: str,
    device_sparse: str,
    compression: Any,
    sparse_as_dense: bool,
    gradient_predivide_factor: float,
    op: int | str = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    *,
    warn_of_steps: bool = True,
) -> Any:
    """Return an optimizer like the given one that reduces gradients over the ranks before each step.

    The new class derives from the given optimizer's class and has the same name. Models saved with the new optimizer
    name the original class.

    If the class and the learning-rate schedule are Keras's own, the new optimizer is made from the configuration. Steps
    and momentum of the given optimizer are then not copied, and a warning is issued if it has made steps. Otherwise the
    configuration may be incomplete, and the new optimizer shares all attributes of the given one.

    Parameters
    ----------
    keras
        Accepted, without effect: the optimizer's class determines the generation of Keras.
    device_dense, device_sparse
        Accepted, without effect with Keras 3.
    warn_of_steps
        Whether to warn if the optimizer has made steps that the new one does not copy.

    Raises
    ------
    TypeError
        `optimizer` is not an optimizer of Keras.
    ValueError
        An argument is invalid, the optimizer is distributed already, or the backend cannot train.
    """
    del keras
    op = resolve_op(op, None)
    check_options(op, gradient_predivide_factor, backward_passes_per_step)
    if not is_keras3_optimizer(optimizer) and not is_keras2_optimizer(optimizer):
        raise TypeError(
            f"Expected an optimizer of Keras, such as keras.optimizers.SGD(0.1), got {optimizer!r:.200}."
        )
    kind = type(optimizer)
    if hasattr(kind, "_hvd"):
        raise ValueError("The optimizer is distributed already; gradients would be reduced twice.")
    reduction = GradientReduction(
        # The default name does not contain the class: one rank may wrap a loss-scaling optimizer, and another rank the
        # optimizer inside it.
        name=name or DEFAULT_NAME,
        compression=compression,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        passes=backward_passes_per_step,
        average_aggregated=average_aggregated_gradients,
        groups=checked_groups(groups),
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    if is_keras2_optimizer(optimizer):
        from horovod._keras._keras2_optimizer import distributed_keras2

        made = distributed_keras2(optimizer, reduction, device_dense, device_sparse)
    else:
        made = _distributed_keras3(optimizer, reduction)
    report_first_steps(made)
    if warn_of_steps and is_set_by_config(optimizer) and _has_stepped(optimizer):
        warnings.warn(
            f"The {kind.__name__} given to DistributedOptimizer has made steps already. The distributed one begins "
            "anew: wrap an optimizer before its first step, or use load_model for one that was saved.",
            stacklevel=3,
        )
    return made


def register_local_layers(optimizer: Any, local_layers: Any) -> None:
    """Exclude these layers from the reduction: each rank applies its own gradients to them.

    Raises
    ------
    ValueError
        `local_layers` is neither a Keras layer nor a collection of Keras layers.
    """
    if _is_layer(local_layers):
        local_layers = [local_layers]
    layers: list[Any] = list(local_layers) if isinstance(local_layers, Iterable) else [local_layers]
    if not all(map(_is_layer, layers)):
        raise ValueError("All local layers must be of tf.keras.layers.Layer type.")
    for layer in layers:
        for variable in layer.trainable_weights:
            optimizer.register_local_var(variable)


def _is_layer(candidate: Any) -> bool:
    """Return whether this is a Keras layer, of either generation."""
    return hasattr(candidate, "trainable_weights") and hasattr(candidate, "call")


def _distributed_keras3(optimizer: Any, reduction: GradientReduction) -> Any:
    keras: Any = sys.modules["keras"]
    wrap_loss_scaling(keras)
    inner = getattr(optimizer, "inner_optimizer", None)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) and inner is not None:
        config = optimizer.get_config()
        config.pop("inner_optimizer")
        return type(optimizer)(_distributed_keras3(inner, reduction), **config)
    kind = distributed_class(DistributedKeras3, type(optimizer), reduction)
    if not is_set_by_config(optimizer):
        return adopted(kind, optimizer)
    made: Any = kind.from_config(optimizer.get_config())  # type: ignore[attr-defined]
    for attribute in _SET_BY_CALLS:
        if hasattr(optimizer, attribute):
            setattr(made, attribute, getattr(optimizer, attribute))
    return made


def _has_stepped(optimizer: Any) -> bool:
    iterations = getattr(optimizer, "_iterations", None)
    if iterations is None or not hasattr(iterations, "numpy"):
        return False
    try:
        return int(iterations.numpy()) > 0
    except (NotImplementedError, TypeError):  # a variable of a graph has no value to read
        return False
