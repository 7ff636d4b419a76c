"""Loads a saved model and wraps its optimizer."""

from __future__ import annotations

from typing import Any

import numpy as np

from horovod._keras import _variables
from horovod._keras._generation import is_keras3
from horovod._keras._optimizer import create_distributed_optimizer


def load_model(
    keras: Any,
    filepath: Any,
    custom_optimizers: Any,
    custom_objects: dict[str, Any] | None,
    compression: Any,
    legacy_opts: bool,
) -> Any:
    """Load a model, replace its optimizer by a distributed one with the same state, and return the model.

    The name and the format in which the optimizer was saved have no influence.
    """
    if legacy_opts and is_keras3(keras):
        raise ValueError(
            "legacy_opts=True: Keras 3 has no legacy optimizers. Install tf_keras, set TF_USE_LEGACY_KERAS=1 and use "
            "horovod.tensorflow.keras."
        )
    known = {kind.__name__: kind for kind in custom_optimizers or ()}
    known.update(custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=known)
    optimizer = model.optimizer
    if optimizer is not None:
        values = [_variables.value_of(v) for v in _variables.variables_of(optimizer)]
        # From HDF5, Keras 3 restores only the optimizer's variables that do not belong to a weight.
        if str(filepath).endswith((".h5", ".hdf5")) and is_keras3(keras):
            values = _optimizer_in_hdf5(filepath) or values
        model.optimizer = _distributed(keras, optimizer, model, compression, values)
    return model


def _optimizer_in_hdf5(filepath: Any) -> list[Any]:
    """Return the values of the optimizer's variables in a model's file; an empty list if the file has none."""
    import h5py  # type: ignore[import-untyped]

    with h5py.File(filepath, "r") as file:
        group = file.get("optimizer_weights")
        if group is None:
            return []
        # A long list of names is split into several numbered attributes.
        parts = [key for key in group.attrs if key.startswith("weight_names")]
        parts.sort(key=lambda key: int(key.removeprefix("weight_names") or 0))
        names = [name for part in parts for name in group.attrs[part]]
        return [np.array(group[name]) for name in names]


def _distributed(
    keras: Any, optimizer: Any, model: Any, compression: Any, before: list[Any]
) -> Any:
    made = create_distributed_optimizer(
        keras, optimizer, None, "", "", compression, False, 1.0, warn_of_steps=False
    )
    if hasattr(made, "build"):
        made.build(model.trainable_variables)
    elif before:
        made._create_all_weights(model.trainable_variables)
    after = _variables.variables_of(made)
    if len(after) != len(before):
        raise ValueError(
            f"The optimizer of the saved model has {len(before)} variables, a new one of its configuration "
            f"{len(after)}: it cannot be continued. Load it with keras.models.load_model and compile it anew."
        )
    for variable, value in zip(after, before, strict=True):
        _variables.assign(variable, value)
    return made
