"""An estimator that trains a Keras model."""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from horovod._keras._generation import is_keras3, keras3_backend
from horovod.spark.common.backend import Backend
from horovod.spark.common.estimator import HorovodEstimator, HorovodModel
from horovod.spark.common.prediction import add_predictions
from horovod.spark.common.util import to_list
from horovod.spark.keras import plain
from horovod.spark.keras.remote import compile_model, train

keras: Any = plain.keras


class _KerasParams:
    """How values of Keras are saved."""

    def to_plain(self: Any, name: str, value: Any) -> Any:
        """A parameter's value as something that pickles."""
        custom = self.getCustomObjects() or {}
        if isinstance(value, keras.Model):
            return plain.plain_model(value, custom, compiled=True)
        if isinstance(value, keras.optimizers.Optimizer):
            return plain.plain_optimizer(value, custom)
        return plain.plain_losses(value) if name == "loss" else value

    def from_plain(self: Any, name: str, value: Any) -> Any:
        """The value of what `to_plain` returned."""
        if isinstance(value, plain.PlainModel):
            return value.load(compiled=True)
        if isinstance(value, plain.PlainOptimizer):
            return value.load()
        return plain.load_losses(value) if name == "loss" else value


class KerasEstimator(_KerasParams, HorovodEstimator):
    """Trains a Keras model on the rows of a DataFrame, on several ranks.

    All parameters are keywords, and have a getter and a setter: `feature_cols`, `getFeatureCols()`,
    `setFeatureCols([...])`.

    Parameters
    ----------
    model, optimizer
        Model to train, and its optimizer; default that of the compiled model.
    loss
        A name, function or object of Keras, or a list of them, one per label column.
    feature_cols, label_cols, sample_weight_col
        Columns, the first two in the order of the model's inputs and outputs.
    store
        Where data and checkpoints are: `Store.create(path)`.
    num_proc, backend
        The number of ranks in Spark, or a backend.
    label_shapes
        Shapes of a batch of labels, -1 for its length; default those of the model's outputs, where they fit.
    batch_size, val_batch_size, epochs, train_steps_per_epoch, validation_steps_per_epoch
        How much.
    validation
        A share of the rows, or a column that marks them.
    metrics, loss_weights
        As of `Model.compile`.
    callbacks, checkpoint_callback
        As of `Model.fit`; the second one saves the model that is returned, its `filepath` is set by the estimator.
    custom_objects
        Names and what they stand for in the model, loss and metrics.
    gradient_compression, backward_passes_per_step, transformation_fn, shuffle, random_seed, run_id, use_gpu,
    inmemory_cache_all, verbose
        See the documentation of the estimators.

    Examples
    --------
    >>> estimator = KerasEstimator(num_proc=2, store=Store.create("/shared"), model=model, optimizer="adam",
    ...     loss="mse", feature_cols=["x"], label_cols=["y"], batch_size=32, epochs=5)
    >>> predictions = estimator.fit(df).transform(df)
    """

    PARAMS: ClassVar[dict[str, Any]] = {
        "custom_objects": {},
        "checkpoint_callback": None,
        "backend_env": {"LIBHDFS_OPTS": "-Xms2048m -Xmx2048m"},
        "tensorflow_dataset_prefetch_buffer_size": 0,
        "backward_passes_per_step": 1,
    }

    def getOptimizer(self) -> Any:
        """The optimizer, or that of the compiled model."""
        optimizer = self.value_of("optimizer")
        if optimizer is None:
            return getattr(self.getModel(), "optimizer", None)
        if isinstance(optimizer, str):
            return keras.optimizers.get(optimizer)
        return optimizer

    def _check_params(self) -> None:
        super()._check_params()
        model, features, labels = self.getModel(), self.getFeatureCols(), self.getLabelCols()
        if not is_keras3(keras) or keras3_backend() != "tensorflow":
            raise ValueError(
                "KerasEstimator needs Keras 3 with its backend tensorflow: unset TF_USE_LEGACY_KERAS and KERAS_BACKEND"
            )
        if not isinstance(model, keras.Model):
            raise ValueError(
                f"model has to be an instance of tensorflow.keras.Model, got {type(model).__name__}"
            )
        if not model.built:
            raise ValueError(
                "model: it has no weights yet; begin it with keras.Input(shape), or call it once"
            )
        if not isinstance(self.getOptimizer(), keras.optimizers.Optimizer):
            raise ValueError(
                f"optimizer: expected one of Keras, or a compiled model, got {self.getOptimizer()!r}"
            )
        if self.getLoss() is None:
            raise ValueError("loss: Loss parameter is required for the model to compile")
        self._check_lengths("loss", "loss_weights", "label_shapes")
        for loss in to_list(self.getLoss(), 1) or []:
            if isinstance(loss, str) and loss not in (self.getCustomObjects() or {}):
                self._known_loss(loss)
        for name, columns, tensors in (
            ("feature_cols", features, getattr(model, "inputs", None)),
            ("label_cols", labels, getattr(model, "outputs", None)),
        ):
            if tensors and len(tensors) != len(columns):
                what = "inputs" if name == "feature_cols" else "outputs"
                raise ValueError(
                    f"{name}: the model has {len(tensors)} {what}, expected as many columns, got {len(columns)}"
                )
        callback = self.getCheckpointCallback()
        if callback is not None and not hasattr(callback, "filepath"):
            raise ValueError(
                f"checkpoint_callback: expected a ModelCheckpoint or a BestModelCheckpoint, got {callback!r}"
            )

    @staticmethod
    def _known_loss(name: str) -> None:
        try:
            keras.losses.get(name)
        except ValueError:
            raise ValueError(
                f"loss: Keras has no loss {name!r}; choose another, or name yours in custom_objects"
            ) from None

    def _fit_on_prepared_data(
        self,
        backend: Backend,
        train_rows: int,
        val_rows: int,
        metadata: dict[str, Any],
        dataset_idx: int | None,
    ) -> KerasModel:
        run_id = self._new_run_id("keras")
        if self.getTransformationFn() is None:
            self._check_sizes(metadata)
        custom = dict(self.getCustomObjects() or {})
        values = self._values()
        values["custom_objects"] = custom
        values["floatx"] = keras.backend.floatx()
        values["model"] = plain.plain_model(self.getModel(), custom, compiled=False)
        values["optimizer"] = optimizer = plain.plain_optimizer(self.getOptimizer(), custom)
        values["loss"] = plain.plain_losses(values["loss"])
        with keras.utils.custom_object_scope(custom):
            model = values["model"].load(compiled=False)
            compile_model(model, optimizer.make(), values)
            if optimizer.values:
                optimizer.fill(model.optimizer)
            values["state"] = plain.save_state(model)
            job = self._job(values, run_id, train_rows, val_rows, dataset_idx)
            history, content = backend.run(train, args=(job,), env=self.getBackendEnv())[0]
            plain.load_state(model, content)
        return KerasModel(
            model=model,
            history=history,
            feature_columns=list(self.getFeatureCols()),
            label_columns=list(self.getLabelCols()),
            run_id=run_id,
            custom_objects=custom,
            _metadata=metadata,
            _floatx=values["floatx"],
        )

    def _check_sizes(self, metadata: dict[str, Any]) -> None:
        model = self.getModel()
        given = self.getLabelShapes()
        inputs = plain.shapes_of(getattr(model, "inputs", None))
        outputs = given or plain.shapes_of(getattr(model, "outputs", None))
        for name, shape in zip(self.getFeatureCols(), inputs, strict=False):
            if not _fits(shape, metadata[name]["max_size"]):
                raise ValueError(
                    f"the model takes inputs of shape {shape}, column {name!r} has "
                    f"{metadata[name]['max_size']} values a row"
                )
        for name, shape in zip(self.getLabelCols(), outputs, strict=False):
            size = metadata[name]["max_size"]
            # Labels that are numbers of classes are one value for many outputs.
            if not _fits(shape, size) and (given or size != 1):
                whose = "label_shapes" if given else "the model's outputs"
                raise ValueError(
                    f"{whose}: expected shape {shape}, column {name!r} has {size} values a row"
                )


def _fits(shape: Any, size: int) -> bool:
    if shape is None:
        return True
    known = int(np.prod([abs(n) for n in shape[1:]], dtype=int))
    is_open = -1 in list(shape[1:])
    return size % max(known, 1) == 0 if is_open else size == known


class KerasModel(_KerasParams, HorovodModel):
    """A trained Keras model; `transform` adds what it predicts to a DataFrame."""

    PARAMS: ClassVar[dict[str, Any]] = {"custom_objects": {}, "_floatx": None}

    def _transform(self, dataset: Any) -> Any:
        names = self._output_columns(dataset)
        saved = plain.plain_model(self.getModel(), self.getCustomObjects() or {}, compiled=False)
        features = list(self.getFeatureColumns())
        opener = _Opener(saved, self.value_of("_floatx"))
        return add_predictions(dataset, opener, features, list(self.getLabelColumns()), names)


class _Opener:
    """Opens the model on an executor."""

    def __init__(self, saved: plain.PlainModel, floatx: str | None) -> None:
        self._saved = saved
        self._floatx = floatx

    def __call__(self) -> Any:
        from pyspark import TaskContext

        if TaskContext.get() is not None:
            # Spark has a task for each core; and GPUs are for training. Too late in a worker that is used again.
            with contextlib.suppress(RuntimeError):
                tf.config.threading.set_intra_op_parallelism_threads(1)
                tf.config.threading.set_inter_op_parallelism_threads(1)
                tf.config.set_visible_devices([], "GPU")
        if self._floatx:
            keras.backend.set_floatx(self._floatx)
        model = self._saved.load(compiled=False)
        inputs = getattr(model, "inputs", None)
        shapes = plain.shapes_of(inputs)

        def predict(arrays: list[Any]) -> list[Any]:
            ready = [
                plain.shaped(array, shapes[i] if shapes else None).astype(
                    str(inputs[i].dtype) if inputs else keras.backend.floatx()
                )
                for i, array in enumerate(arrays)
            ]
            outputs = model(ready[0] if len(ready) == 1 else tuple(ready), training=False)
            return [np.asarray(output) for output in tf.nest.flatten(outputs)]

        return predict
