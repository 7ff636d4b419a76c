"""An estimator that trains a Lightning module, or a plain PyTorch module in its place."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from horovod.spark.common.backend import Backend
from horovod.spark.common.estimator import HorovodEstimator, HorovodModel
from horovod.spark.common.prediction import add_predictions
from horovod.spark.common.util import to_list
from horovod.spark.lightning.legacy import is_lightning_module
from horovod.spark.lightning.remote import train
from horovod.spark.torch.estimator import _from_plain, _to_plain, shapes_of_inputs
from horovod.spark.torch.remote import adopt

MIN_PL_VERSION = "2.0.0"


class TorchEstimator(HorovodEstimator):
    """Trains a LightningModule on the rows of a DataFrame, on several ranks.

    All parameters are keywords, and have a getter and a setter. `training_step` gets a dict of column name to
    tensor, as the rows have them. A plain module is trained, too, with `optimizer` and `loss`.

    Examples
    --------
    >>> estimator = TorchEstimator(num_proc=2, store=Store.create("/shared"), model=module,
    ...     feature_cols=["x"], label_cols=["y"], batch_size=32, epochs=5)
    >>> predictions = estimator.fit(df).transform(df)
    """

    PARAMS: ClassVar[dict[str, Any]] = {
        "input_shapes": None,
        "loss_constructors": None,
        "train_minibatch_fn": None,
        "num_gpus": None,
        "logger": None,
        "log_every_n_steps": 50,
        "loader_num_epochs": None,
        "terminate_on_nan": False,
        "profiler": None,
        "trainer_args": None,
        "debug_data_loader": False,
        "train_async_data_loader_queue_size": None,
        "val_async_data_loader_queue_size": None,
    }
    NO_EFFECT: ClassVar[dict[str, str]] = {
        "metrics": "log them in the module, by self.log(..., sync_dist=True)",
        "train_minibatch_fn": "it is the module's training_step",
        "loader_num_epochs": "data is read for as long as the training asks for it",
    }

    def to_plain(self, name: str, value: Any) -> Any:
        """A parameter's value as something that pickles."""
        return _to_plain(value)

    def from_plain(self, name: str, value: Any) -> Any:
        """The value of what `to_plain` returned."""
        return _from_plain(value)

    def getOptimizer(self) -> Any:
        """The optimizer of a plain module, on its parameters."""
        model, optimizer = self.getModel(), self.value_of("optimizer")
        if model is not None and isinstance(optimizer, torch.optim.Optimizer):
            adopt(optimizer, model)
        return optimizer

    def _check_params(self) -> None:
        super()._check_params()
        if is_lightning_module(self.getModel()):
            for name in ("optimizer", "loss", "loss_weights", "loss_constructors"):
                if self.value_of(name) is not None:
                    raise ValueError(
                        f"{name} is not for a LightningModule, which has configure_optimizers and training_step"
                    )
        else:
            if not isinstance(self.getOptimizer(), torch.optim.Optimizer):
                raise ValueError(
                    "model: expected a LightningModule, or a plain module with optimizer and loss; got "
                    f"{type(self.getModel()).__name__} with optimizer {self.getOptimizer()!r}"
                )
            if (self.getLoss() is None) == (self.getLossConstructors() is None):
                raise ValueError("give either loss or loss_constructors, and not both")
        self._check_lengths("loss", "loss_constructors", "loss_weights", "label_shapes")
        shapes, features = self.getInputShapes(), self.getFeatureCols()
        if shapes is not None and len(shapes) != len(features):
            raise ValueError(
                f"input_shapes: expected one for each of the {len(features)} feature columns, got {len(shapes)}"
            )
        for name in ("strategy", "accelerator", "devices", "num_nodes"):
            if name in (self.getTrainerArgs() or {}):
                raise ValueError(f"trainer_args: {name} is the estimator's to choose; remove it")
        for name in ("train_async_data_loader_queue_size", "val_async_data_loader_queue_size"):
            value = self.value_of(name)
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int | float)
            ):
                raise RuntimeError(
                    f"{name}: expected a number of batches or a share of an epoch's, got {value!r}"
                )

    def _fit_on_prepared_data(
        self,
        backend: Backend,
        train_rows: int,
        val_rows: int,
        metadata: dict[str, Any],
        dataset_idx: int | None,
    ) -> TorchModel:
        run_id = self._new_run_id("pytorch")
        labels, features = list(self.getLabelCols()), list(self.getFeatureCols())
        values = self._values()
        values["model"] = _to_plain(values["model"])
        values["loss"] = to_list(values["loss"], len(labels))
        values["loss_constructors"] = to_list(values["loss_constructors"], len(labels))
        values["optimizer"] = self.getOptimizer()
        is_plain = not is_lightning_module(self.getModel())
        shapes = shapes_of_inputs(self, metadata) if is_plain else self.getInputShapes()
        values["input_shapes"] = shapes
        job = self._job(values, run_id, train_rows, val_rows, dataset_idx)
        history, content = backend.run(train, args=(job,))[0]
        model = _from_plain(_to_plain(self.getModel()))
        if model is self.getModel():
            model = copy.deepcopy(model)
        model.load_state_dict(torch.load(io.BytesIO(content), weights_only=False))
        return TorchModel(
            model=model,
            history=history,
            feature_columns=features,
            label_columns=labels,
            input_shapes=shapes,
            run_id=run_id,
            _metadata=metadata,
            loss=self.getLoss(),
            loss_constructors=self.getLossConstructors(),
        )


class TorchModel(HorovodModel):
    """A trained module; `transform` adds what it predicts to a DataFrame."""

    PARAMS: ClassVar[dict[str, Any]] = {
        "optimizer": None,
        "input_shapes": None,
        "loss": None,
        "loss_constructors": None,
    }

    def to_plain(self, name: str, value: Any) -> Any:
        """A parameter's value as something that pickles."""
        return _to_plain(value)

    def from_plain(self, name: str, value: Any) -> Any:
        """The value of what `to_plain` returned."""
        return _from_plain(value)

    def get_prediction_fn(self) -> Callable[[Any, Any], Any]:
        """A function of model and row that returns the outputs: for subclasses to replace.

        `row` has the feature columns by name; this one makes a batch of one row.
        """
        features, shapes = list(self.getFeatureColumns()), self.getInputShapes()

        def predict(model: Any, row: Any) -> Any:
            return model(*_inputs([_array(row[name])[None] for name in features], shapes))

        return predict

    def _transform(self, dataset: Any) -> Any:
        names = self._output_columns(dataset)
        model = self.getModel().cpu().eval()
        features = list(self.getFeatureColumns())
        own = type(self).get_prediction_fn is not TorchModel.get_prediction_fn
        opener = _Opener(
            _to_plain(model),
            self.getInputShapes(),
            features,
            self.get_prediction_fn() if own else None,
        )
        return add_predictions(dataset, opener, features, list(self.getLabelColumns()), names)


def _array(value: Any) -> Any:
    import numpy as np

    return value.toArray() if hasattr(value, "toArray") else np.asarray(value)


def _inputs(arrays: list[Any], shapes: list[Any] | None) -> list[torch.Tensor]:
    tensors = [torch.as_tensor(array) for array in arrays]
    return [
        (tensor.float() if tensor.is_floating_point() else tensor).reshape(shape or tensor.shape)
        for tensor, shape in zip(tensors, shapes or [None] * len(tensors), strict=True)
    ]


class _Opener:
    """Opens the model on an executor."""

    def __init__(
        self, plain: Any, shapes: list[Any] | None, features: list[str], by_row: Any
    ) -> None:
        self._plain = plain
        self._shapes = shapes
        self._features = features
        self._by_row = by_row

    def __call__(self) -> Any:
        model = _from_plain(self._plain).eval()

        def predict(arrays: list[Any]) -> list[Any]:
            with torch.no_grad():
                if self._by_row is None:
                    return [output.numpy() for output in _several(model(*self._tensors(arrays)))]
                rows = [
                    _several(self._by_row(model, dict(zip(self._features, row, strict=True))))
                    for row in zip(*arrays, strict=True)
                ]
                return [
                    torch.stack([part.reshape(-1) for part in column]).numpy()
                    for column in zip(*rows, strict=True)
                ]

        return predict

    def _tensors(self, arrays: list[Any]) -> list[torch.Tensor]:
        return _inputs(arrays, self._shapes)


def _several(outputs: Any) -> list[torch.Tensor]:
    found = list(outputs) if isinstance(outputs, list | tuple) else [outputs]
    return [output.detach().float() for output in found]
