"""A rank's training of a Keras model for an estimator."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

import horovod.tensorflow.keras as hvd
from horovod.spark.common.job import READ_AHEAD, Job, gpu_of_rank, require_numbers
from horovod.spark.common.row_reader import AsyncRowBatches
from horovod.spark.common.util import to_list
from horovod.spark.keras import plain
from horovod.spark.keras.callbacks import ProgressCallback

keras: Any = plain.keras


def train(job: Job) -> Any:
    """Train; rank 0 returns the history and a checkpoint's content, the others None."""
    with job.begun(hvd), keras.utils.custom_object_scope(job.values["custom_objects"]):
        return _Training(job).run()


def compile_model(model: Any, optimizer: Any, values: dict[str, Any]) -> None:
    """Compile with the loss and metrics of an estimator, and make the optimizer's variables."""
    custom, count = values["custom_objects"], len(values["label_cols"])
    losses: Any = [
        custom.get(loss, loss) if isinstance(loss, str) else loss
        for loss in to_list(plain.load_losses(values["loss"]), count) or []
    ]
    weights = values["loss_weights"]
    if count == 1:
        losses = losses[0]
        weights = to_list(weights, 1)
    model.compile(
        optimizer=optimizer,
        loss=losses,
        loss_weights=weights,
        metrics=list(values["metrics"] or []),
    )
    model.optimizer.build(model.trainable_variables)


class _Training:
    """Model and data of one rank."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.values = values = job.values
        keras.backend.set_floatx(values["floatx"])
        _choose_device(values["use_gpu"])
        if values["random_seed"] is not None:
            # Weights come from the driver; masks of dropout differ between ranks.
            keras.utils.set_random_seed(values["random_seed"] + hvd.rank())
        options: dict[str, Any] = {}
        if values["gradient_compression"] is not None:
            options["compression"] = values["gradient_compression"]
        optimizer = hvd.DistributedOptimizer(
            values["optimizer"].make(),
            backward_passes_per_step=values["backward_passes_per_step"],
            average_aggregated_gradients=True,
            **options,
        )
        self.model = values["model"].load(compiled=False)
        compile_model(self.model, optimizer, values)
        plain.load_state(self.model, job.checkpoint or values["state"])
        self._scale_rate(hvd.size())
        self._input_shapes = plain.shapes_of(getattr(self.model, "inputs", None))
        self._label_shapes = values["label_shapes"]

    def _scale_rate(self, factor: float) -> None:
        optimizer = self.model.optimizer
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        if isinstance(inner._learning_rate, keras.optimizers.schedules.LearningRateSchedule):
            return
        inner.learning_rate = float(inner.learning_rate.numpy()) * factor

    @contextlib.contextmanager
    def rate_of_one_rank(self) -> Iterator[None]:
        """Have the optimizer hold, within the block, the learning rate of one rank."""
        self._scale_rate(1 / hvd.size())
        try:
            yield
        finally:
            self._scale_rate(hvd.size())

    def run(self) -> Any:
        """All epochs."""
        job, values = self.job, self.values
        is_first = hvd.rank() == 0
        steps = values["train_steps_per_epoch"] or -(
            -job.train_rows // (values["batch_size"] * hvd.size())
        )
        ahead = values["tensorflow_dataset_prefetch_buffer_size"] or READ_AHEAD
        loaders = [job.rows(hvd.rank(), hvd.size(), training=True, ahead=ahead)]
        validation = None
        if job.val_rows:
            # A rank without rows would have no metrics to average.
            share = (hvd.rank(), hvd.size()) if job.val_rows >= hvd.size() else (0, 1)
            loaders.append(job.rows(*share, training=False, ahead=ahead))
            validation = self._dataset(loaders[1])
            count = min(len(loaders[1]), values["validation_steps_per_epoch"] or len(loaders[1]))
            validation = validation.take(count).apply(
                tf.data.experimental.assert_cardinality(count)
            )
        with job.store.get_local_output_dir_fn(job.run_id)() as folder:
            callbacks, checkpoint = self._callbacks(folder)
            try:
                history = self.model.fit(
                    self._dataset(loaders[0]),
                    steps_per_epoch=steps,
                    epochs=values["epochs"],
                    validation_data=validation,
                    callbacks=callbacks,
                    verbose=values["verbose"] if is_first else 0,
                ).history
            finally:
                for loader in loaders:
                    loader.close_async_loader()
            if not is_first:
                return None
            content = checkpoint.content()
            if content is None:  # a callback that keeps the best, and has seen none
                with self.rate_of_one_rank():
                    content = plain.save_state(self.model)
            return _numbers(history), content

    def _callbacks(self, folder: str) -> tuple[list[Any], Any]:
        values = self.values
        summaries: list[Any] = []
        others: list[Any] = []
        for callback in values["callbacks"] or []:
            is_summary = isinstance(callback, keras.callbacks.TensorBoard)
            (summaries if is_summary else others).append(callback)
            if hasattr(callback, "initial_lr"):
                callback.initial_lr *= hvd.size()
        found = [
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            *others,
            ProgressCallback(),
        ]
        if hvd.rank() != 0:
            return found, None
        checkpoint = _Checkpoint(self, folder)
        found.append(checkpoint)
        if self.job.store.saving_runs():
            if not summaries and importlib.util.find_spec("tensorboard") is not None:
                summaries = [keras.callbacks.TensorBoard(folder)]
            for summary in summaries:
                summary.log_dir = os.path.join(folder, self.job.store.get_logs_subdir())
            found += [*summaries, _Keep(self.job, folder, checkpoint)]
        else:
            found += summaries
        return found, checkpoint

    def _dataset(self, loader: AsyncRowBatches) -> Any:
        def batches() -> Iterator[Any]:
            return map(self._batch, loader)

        def spec(array: Any) -> Any:
            return tf.TensorSpec((None, *array.shape[1:]), array.dtype)

        signature = tf.nest.map_structure(spec, self._batch(loader.sample()))
        return tf.data.Dataset.from_generator(batches, output_signature=signature).prefetch(2)

    def _batch(self, columns: dict[str, Any]) -> Any:
        """Features, labels, and weights of rows if there is a column of them."""
        values = self.values
        names = values["feature_cols"]
        inputs = getattr(self.model, "inputs", None) or [None] * len(names)
        features = []
        for name, tensor, shape in zip(
            names, inputs, self._input_shapes or [None] * len(names), strict=True
        ):
            dtype = values["floatx"] if tensor is None else str(tensor.dtype)
            features.append(plain.shaped(_numeric(columns, name), shape).astype(dtype))
        given = self._label_shapes is not None
        shapes = self._label_shapes or plain.shapes_of(getattr(self.model, "outputs", None))
        count = len(values["label_cols"])
        labels = [
            _of_floatx(plain.shaped(_numeric(columns, name), shape, strict=given))
            for name, shape in zip(values["label_cols"], shapes or [None] * count, strict=True)
        ]
        parts = [_one_or_all(features), _one_or_all(labels)]
        if values["sample_weight_col"]:
            weights = _numeric(columns, values["sample_weight_col"]).reshape(-1)
            parts.append(_one_or_all([weights.astype(values["floatx"])] * count))
        return tuple(parts)


class _Checkpoint(keras.callbacks.Callback):
    """The estimator's checkpoint callback, which saves the learning rate of one rank, into a local file."""

    def __init__(self, training: _Training, folder: str) -> None:
        super().__init__()
        self._training = training
        inner = training.values["checkpoint_callback"]
        weights_only = getattr(inner, "save_weights_only", False)
        if inner is None:
            try:
                training.model.get_compile_config()
            except Exception:  # a loss or metric that Keras cannot save
                weights_only = True
        name = "checkpoint.weights.h5" if weights_only else "checkpoint.keras"
        self._path = os.path.join(folder, name)
        if inner is None:
            inner = keras.callbacks.ModelCheckpoint(self._path, save_weights_only=weights_only)
        inner.filepath = self._path
        self._inner = inner
        self._at_batches = getattr(inner, "save_freq", "epoch") != "epoch"

    def content(self) -> bytes | None:
        """The content saved last."""
        if not os.path.exists(self._path):
            return None
        with open(self._path, "rb") as file:
            return file.read()

    def changed(self) -> int:
        """When it was saved last."""
        return os.stat(self._path).st_mtime_ns if os.path.exists(self._path) else 0

    def set_params(self, params: Any) -> None:
        """Hand on."""
        super().set_params(params)
        self._inner.set_params(params)

    def set_model(self, model: Any) -> None:
        """Hand on."""
        super().set_model(model)
        self._inner.set_model(model)

    def on_train_begin(self, logs: Any = None) -> None:
        """Hand on."""
        self._inner.on_train_begin(logs)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Hand on."""
        self._inner.on_epoch_begin(epoch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Hand on, if it saves at batches."""
        if self._at_batches:
            with self._training.rate_of_one_rank():
                self._inner.on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Hand on."""
        with self._training.rate_of_one_rank():
            self._inner.on_epoch_end(epoch, logs)

    def on_train_end(self, logs: Any = None) -> None:
        """Hand on."""
        with self._training.rate_of_one_rank():
            self._inner.on_train_end(logs)


class _Keep(keras.callbacks.Callback):
    """Copies the checkpoint and the logs into the store after each epoch."""

    def __init__(self, job: Job, folder: str, checkpoint: _Checkpoint) -> None:
        super().__init__()
        self._job = job
        self._logs = os.path.join(folder, job.store.get_logs_subdir())
        self._checkpoint = checkpoint
        self._kept = 0

    def _copy(self) -> None:
        store, run_id = self._job.store, self._job.run_id
        changed = self._checkpoint.changed()
        if changed != self._kept:
            path = f"{store.get_checkpoint_path(run_id)}/{store.get_checkpoint_filename()}"
            store.write_bytes(path, self._checkpoint.content())
            self._kept = changed
        if os.path.isdir(self._logs):
            store.copy(self._logs, store.get_logs_path(run_id), recursive=True)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Copy."""
        self._copy()

    def on_train_end(self, logs: Any = None) -> None:
        """Copy what came after the last epoch."""
        self._copy()


def _numeric(columns: dict[str, Any], name: str) -> Any:
    require_numbers(name, columns[name])
    return columns[name]


def _of_floatx(array: Any) -> Any:
    return array.astype(keras.backend.floatx()) if array.dtype.kind == "f" else array


def _one_or_all(arrays: list[Any]) -> Any:
    return arrays[0] if len(arrays) == 1 else tuple(arrays)


def _numbers(history: dict[str, list[Any]]) -> dict[str, list[float]]:
    return {name: [float(np.asarray(v)) for v in values] for name, values in history.items()}


def _choose_device(use_gpu: bool) -> None:
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return
    chosen = [gpus[gpu_of_rank(hvd.local_rank()) % len(gpus)]] if use_gpu else []
    tf.config.set_visible_devices(chosen, "GPU")
    for gpu in chosen:
        tf.config.experimental.set_memory_growth(gpu, True)
