"""An estimator that trains a PyTorch model."""

from __future__ import annotations

import copy
import io
from typing import Any, ClassVar

import torch

from horovod.spark.common.backend import Backend
from horovod.spark.common.estimator import HorovodEstimator, HorovodModel
from horovod.spark.common.prediction import add_predictions
from horovod.spark.common.util import to_list
from horovod.spark.torch.remote import adopt, train


def _to_plain(value: Any) -> Any:
    if isinstance(value, torch.jit.ScriptModule):
        buffer = io.BytesIO()
        torch.jit.save(value, buffer)
        return ("torchscript", buffer.getvalue())
    return value


def _from_plain(value: Any) -> Any:
    if isinstance(value, tuple) and len(value) == 2 and value[0] == "torchscript":
        return torch.jit.load(io.BytesIO(value[1]))  # type: ignore[no-untyped-call]
    return value


def shapes_of_inputs(estimator: HorovodEstimator, metadata: dict[str, Any]) -> list[Any] | None:
    """Shapes of a batch: those given; else a column of numbers feeds a `Linear(1, ...)` as a matrix, alone or as the
    first layer of a `Sequential`.

    Other modules get it as a vector, as the rows have it.
    """
    model: torch.nn.Module = estimator.getModel()
    given: list[Any] | None = estimator.value_of("input_shapes")
    if given is not None or estimator.value_of("transformation_fn") is not None:
        return given
    first = model
    while isinstance(first, torch.nn.Sequential) and len(first):
        first = first[0]
    if not isinstance(first, torch.nn.Linear) or first.in_features != 1:
        return None
    columns = estimator.value_of("feature_cols")
    return [[-1, 1] if metadata[name]["shape"] is None else None for name in columns]


class TorchEstimator(HorovodEstimator):
    """Trains a PyTorch model on the rows of a DataFrame, on several ranks.

    All parameters are keywords, and have a getter and a setter: `feature_cols`, `getFeatureCols()`,
    `setFeatureCols([...])`.

    Parameters
    ----------
    model, optimizer
        Model to train, and an optimizer of its parameters.
    loss
        A function of output and label, or a list of them, one per label column; or `loss_constructors`.
    feature_cols, label_cols, sample_weight_col
        Columns. The model is called with one tensor per feature column.
    store
        Where data and checkpoints are: `Store.create(path)`.
    num_proc, backend
        The number of ranks in Spark, or a backend.
    input_shapes, label_shapes
        Shapes of a batch, -1 for its length; default as the rows have it.
    batch_size, val_batch_size, epochs, train_steps_per_epoch, validation_steps_per_epoch
        How much.
    validation
        A share of the rows, or a column that marks them.
    metrics
        Lists of functions of output and label, one for all labels or one per label.
    loss_weights, gradient_compression, backward_passes_per_step, train_minibatch_fn, transformation_fn, shuffle,
    random_seed, run_id, use_gpu, inmemory_cache_all, verbose
        See the documentation of the estimators.

    Examples
    --------
    >>> estimator = TorchEstimator(num_proc=2, store=Store.create("/shared"), model=model, optimizer=optimizer,
    ...     loss=torch.nn.MSELoss(), feature_cols=["x"], label_cols=["y"], batch_size=32, epochs=5)
    >>> predictions = estimator.fit(df).transform(df)
    """

    PARAMS: ClassVar[dict[str, Any]] = {
        "input_shapes": None,
        "loss_constructors": None,
        "train_minibatch_fn": None,
        "backward_passes_per_step": 1,
    }
    NO_EFFECT: ClassVar[dict[str, str]] = {
        "callbacks": "a loop of PyTorch has no hooks for them; see train_minibatch_fn"
    }

    def to_plain(self, name: str, value: Any) -> Any:
        """A parameter's value as something that pickles."""
        return _to_plain(value)

    def from_plain(self, name: str, value: Any) -> Any:
        """The value of what `to_plain` returned."""
        return _from_plain(value)

    def getOptimizer(self) -> Any:
        """The optimizer, on the model's parameters."""
        model, optimizer = self.getModel(), self.value_of("optimizer")
        if model is not None and optimizer is not None:
            adopt(optimizer, model)
        return optimizer

    def _check_params(self) -> None:
        super()._check_params()
        if not isinstance(self.getOptimizer(), torch.optim.Optimizer):
            raise ValueError(
                f"optimizer: expected a torch.optim.Optimizer of the model, got {self.getOptimizer()!r}"
            )
        if (self.getLoss() is None) == (self.getLossConstructors() is None):
            raise ValueError("give either loss or loss_constructors, and not both")
        self._check_lengths("loss", "loss_constructors", "loss_weights", "label_shapes")
        shapes = self.getInputShapes()
        if shapes is not None and len(shapes) != len(self.getFeatureCols()):
            raise ValueError(
                f"input_shapes: expected one for each of the {len(self.getFeatureCols())} feature columns, "
                f"got {len(shapes)}"
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
        if self.getTransformationFn() is None:
            self._check_sizes(metadata, features)
        values = self._values()
        values["model"] = _to_plain(values["model"])
        values["loss"] = to_list(values["loss"], len(labels))
        values["loss_constructors"] = to_list(values["loss_constructors"], len(labels))
        values["optimizer"] = self.getOptimizer()
        values["input_shapes"] = shapes = shapes_of_inputs(self, metadata)
        del values["callbacks"]
        job = self._job(values, run_id, train_rows, val_rows, dataset_idx)
        history, content = backend.run(train, args=(job,))[0]
        states = torch.load(io.BytesIO(content), weights_only=False)
        model = _from_plain(_to_plain(self.getModel()))
        if model is self.getModel():
            model = copy.deepcopy(model)
        model.load_state_dict(states["model"])
        return TorchModel(
            model=model,
            history=history,
            optimizer=states["optimizer"],
            feature_columns=features,
            label_columns=labels,
            input_shapes=shapes,
            run_id=run_id,
            _metadata=metadata,
            loss=self.getLoss(),
            loss_constructors=self.getLossConstructors(),
        )

    def _check_sizes(self, metadata: dict[str, Any], features: list[str]) -> None:
        for name, shape in zip(features, self.getInputShapes() or [], strict=False):
            size = 1
            for extent in shape:
                size *= abs(extent)
            if size != metadata[name]["max_size"]:
                raise ValueError(
                    f"input_shapes: {shape} has {size} values a row, column {name!r} has {metadata[name]['max_size']}"
                )


class TorchModel(HorovodModel):
    """A trained PyTorch model; `transform` adds what it predicts to a DataFrame."""

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

    def _transform(self, dataset: Any) -> Any:
        names = self._output_columns(dataset)
        plain, shapes = _to_plain(self.getModel().cpu().eval()), self.getInputShapes()
        features = list(self.getFeatureColumns())
        opener = _Opener(plain, shapes or [None] * len(features))
        return add_predictions(dataset, opener, features, list(self.getLabelColumns()), names)


class _Opener:
    """Opens the model on an executor."""

    def __init__(self, plain: Any, shapes: list[Any]) -> None:
        self._plain = plain
        self._shapes = shapes

    def __call__(self) -> Any:
        model = _from_plain(self._plain).eval()

        def predict(arrays: list[Any]) -> list[Any]:
            inputs = [
                torch.as_tensor(array).float().reshape(shape or array.shape)
                for array, shape in zip(arrays, self._shapes, strict=True)
            ]
            with torch.no_grad():
                outputs = model(*inputs)
            several = outputs if isinstance(outputs, list | tuple) else [outputs]
            return [output.detach().float().numpy() for output in several]

        return predict
