"""Models, optimizers and losses of Keras as values that pickle, whole; and batches in the shapes of a model."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from horovod._keras import _variables

keras: Any = tf.keras


@dataclass
class PlainModel:
    """A saved model, and what it needs to be loaded."""

    content: bytes
    custom_objects: dict[str, Any] = field(default_factory=dict)

    def load(self, *, compiled: bool) -> Any:
        """The model; its functions are not checked, so load only what you trust."""
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "model.keras")
            with open(path, "wb") as file:
                file.write(self.content)
            with keras.utils.custom_object_scope(self.custom_objects):
                return keras.models.load_model(path, compile=compiled, safe_mode=False)


def plain_model(model: Any, custom_objects: dict[str, Any], *, compiled: bool) -> PlainModel:
    """Save a model, with or without its optimizer, loss and metrics."""
    was_compiled = model.compiled
    # Loss and metrics may be what Keras cannot save.
    model.compiled = was_compiled and compiled
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "model.keras")
            model.save(path)
            return PlainModel(_content(path), dict(custom_objects))
    finally:
        model.compiled = was_compiled


@dataclass
class PlainOptimizer:
    """Configuration and variables of an optimizer."""

    config: Any
    values: list[Any]
    shapes: list[Any]  # of the weights that it was built for
    custom_objects: dict[str, Any] = field(default_factory=dict)

    def make(self) -> Any:
        """A new optimizer, without the variables' values."""
        return keras.optimizers.deserialize(self.config, custom_objects=self.custom_objects)

    def fill(self, optimizer: Any) -> None:
        """Give an optimizer, built for weights of the same shapes, the values."""
        variables = _variables.variables_of(optimizer)
        if [tuple(v.shape) for v in variables] != [np.shape(v) for v in self.values]:
            raise ValueError(
                f"optimizer: it was used for weights of shapes {self.shapes}, not for those of this model; "
                "pass a new one"
            )
        for variable, value in zip(variables, self.values, strict=True):
            _variables.assign(variable, value)

    def load(self) -> Any:
        """The optimizer as it was."""
        optimizer = self.make()
        if self.shapes:
            optimizer.build([keras.Variable(np.zeros(shape, np.float32)) for shape in self.shapes])
            self.fill(optimizer)
        return optimizer


def plain_optimizer(optimizer: Any, custom_objects: dict[str, Any]) -> PlainOptimizer:
    """Read an optimizer; of one that has made no step for a model only the configuration."""
    # No public name says for which weights an optimizer was built; a Keras without this one has to raise.
    weights = optimizer._trainable_variables if optimizer.built else []
    values = [_variables.value_of(v) for v in _variables.variables_of(optimizer)] if weights else []
    config = keras.optimizers.serialize(optimizer)
    return PlainOptimizer(config, values, [tuple(w.shape) for w in weights], dict(custom_objects))


@dataclass
class PlainLoss:
    """A loss object, by its attributes: the configurations of some lack arguments."""

    kind: type
    attributes: dict[str, Any]

    def load(self) -> Any:
        """The loss object."""
        loss: Any = object.__new__(self.kind)
        loss.__dict__.update(self.attributes)
        return loss


def plain_losses(losses: Any) -> Any:
    """Losses with their objects replaced."""
    if isinstance(losses, list | tuple):
        return [plain_losses(loss) for loss in losses]
    if isinstance(losses, keras.losses.Loss):
        return PlainLoss(type(losses), dict(vars(losses)))
    return losses


def load_losses(plain: Any) -> Any:
    """The argument of `plain_losses`."""
    if isinstance(plain, list):
        return [load_losses(loss) for loss in plain]
    return plain.load() if isinstance(plain, PlainLoss) else plain


def save_state(model: Any) -> bytes:
    """Weights of a model, and variables of its optimizer."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "state.weights.h5")
        model.save_weights(path)
        return _content(path)


def load_state(model: Any, content: bytes) -> None:
    """Give a compiled model what `save_state`, or a checkpoint of Keras, holds."""
    suffix = ".keras" if content.startswith(b"PK") else ".weights.h5"
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, f"state{suffix}")
        with open(path, "wb") as file:
            file.write(content)
        model.load_weights(path)


def _content(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def shapes_of(tensors: Any) -> list[Any]:
    """Shapes of inputs or outputs, -1 for what is open; none for a model that does not say."""
    shapes = [getattr(tensor, "shape", None) for tensor in tensors or []]
    return [
        None if shape is None else [-1 if n is None else int(n) for n in shape] for shape in shapes
    ]


def shaped(values: Any, shape: Sequence[int] | None, *, strict: bool = True) -> Any:
    """A batch in a shape, the first extent being its rows, if at most one of the others is open.

    Without `strict` it stays as it is where it does not fit.
    """
    if shape is None or list(shape[1:]).count(-1) > 1:
        return values
    rest = list(shape[1:])
    if not strict:
        known = int(np.prod([n for n in rest if n != -1], dtype=int))
        size = values[0].size if len(values) else known
        if (size % max(known, 1) if -1 in rest else size != known) or not known:
            return values
    if not len(values):
        return values.reshape(0, *[max(n, 0) for n in rest])
    return values.reshape(len(values), *rest)
