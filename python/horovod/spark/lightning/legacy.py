"""Plain PyTorch modules, with an optimizer and a loss, as Lightning modules."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from horovod.spark.common.util import to_list
from horovod.spark.torch.remote import adopt, rowwise
from horovod.torch.lightning import lightning_package


def package_of(values: list[Any]) -> str:
    """The package of Lightning that modules and callbacks come from; else the one that is there."""
    for value in values:
        for kind in type(value).__mro__:
            for name in ("pytorch_lightning", "lightning.pytorch"):
                if kind.__module__.startswith(f"{name}."):
                    return name
    return lightning_package()


def is_lightning_module(model: Any) -> bool:
    """Whether a model is a LightningModule, of whichever package."""
    return any(
        kind.__name__ == "LightningModule"
        and kind.__module__.startswith(("lightning.", "pytorch_lightning."))
        for kind in type(model).__mro__
    )


def takes_names(model: Any, names: list[str]) -> bool:
    """Whether the parameters of `forward` have the names of the feature columns."""
    try:
        return set(names) <= set(inspect.signature(model.forward).parameters)
    except (TypeError, ValueError):  # TorchScript
        return False


def to_lightning_module(
    model: Any,
    optimizer: Any,
    loss_fns: Any,
    loss_weights: list[float] | None,
    feature_cols: list[str],
    label_cols: list[str],
    sample_weights_col: str | None = None,
    validation: Any = None,
    input_shapes: list[Any] | None = None,
    label_shapes: list[Any] | None = None,
    package: str | None = None,
) -> Any:
    """A LightningModule that trains a plain module, its attribute `model`.

    The module is called with one float tensor per feature column: as keywords if its parameters have the columns'
    names, else in their order. `train_loss` and `val_loss` are logged.
    """
    del validation  # whether there are batches to validate with decides
    lightning: Any = importlib.import_module(package or lightning_package())
    losses: Any = to_list(loss_fns, len(label_cols))
    weights = loss_weights or [1.0 / len(label_cols)] * len(label_cols)
    by_name = takes_names(model, feature_cols)

    class Legacy(lightning.LightningModule):  # type: ignore[misc,unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.model(*args, **kwargs)

        def configure_optimizers(self) -> Any:
            adopt(optimizer, self.model)
            return optimizer

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self._step(batch, "train_loss")

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            return self._step(batch, "val_loss")

        def _step(self, batch: Any, name: str) -> Any:
            inputs = _floats(batch, feature_cols, input_shapes)
            labels = _floats(batch, label_cols, label_shapes)
            found = (
                self(**dict(zip(feature_cols, inputs, strict=True))) if by_name else self(*inputs)
            )
            outputs = list(found) if isinstance(found, list | tuple) else [found]
            rows = batch[sample_weights_col].float() if sample_weights_col else None
            total: Any = 0
            for loss, output, label, weight in zip(losses, outputs, labels, weights, strict=True):
                if label_shapes is None and label.numel() == output.numel():
                    label = label.reshape(output.shape)
                if rows is None:
                    total = total + weight * loss(output, label)
                else:
                    each = rowwise(loss, output, label).reshape(len(rows), -1).mean(dim=1)
                    total = total + weight * (each * rows.reshape(-1)).mean()
            self.log(
                name, total, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(inputs[0])
            )
            return total

    return Legacy()


def _floats(batch: Any, names: list[str], shapes: list[Any] | None) -> list[Any]:
    tensors = [batch[name].float() for name in names]
    return [
        tensor if shape is None else tensor.reshape(shape)
        for tensor, shape in zip(tensors, shapes or [None] * len(tensors), strict=True)
    ]
