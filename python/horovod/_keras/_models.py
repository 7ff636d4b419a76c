"""Loading a saved model with its optimizer wrapped."""

from __future__ import annotations

from typing import Any

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
    """Load a model, then put a distributed optimizer with the same state in the place of its optimizer.

    So it does not matter under which name the optimizer was saved, nor in which format.
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
        model.optimizer = _distributed(keras, optimizer, model, compression)
    return model


def _distributed(keras: Any, optimizer: Any, model: Any, compression: Any) -> Any:
    before = [_variables.value_of(variable) for variable in _variables.variables_of(optimizer)]
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
