"""A rank's training of a Lightning module for an estimator."""

from __future__ import annotations

import importlib
import io
import itertools
import math
import os
from collections.abc import Iterator
from typing import Any

import torch

import horovod.torch as hvd
from horovod import progress
from horovod.data import BaseDataLoader
from horovod.spark.common.job import READ_AHEAD, Job, require_numbers
from horovod.spark.common.row_reader import AsyncRowBatches
from horovod.spark.lightning.legacy import is_lightning_module, package_of, to_lightning_module
from horovod.spark.torch.remote import adopt, own_device
from horovod.torch.lightning import strategy_class

# The first is for who has the package for it; the second needs none.
_LOGGERS = ("TensorBoardLogger", "CSVLogger")


def train(job: Job) -> Any:
    """Train; rank 0 returns what was logged last and the weights, the others None."""
    with job.begun(hvd), job.store.get_local_output_dir_fn(job.run_id)() as folder:
        return _fit(job, folder)


class Batches(BaseDataLoader):
    """Batches of a rank as dicts of tensors, as many in each epoch; training goes on where the last epoch ended."""

    def __init__(self, rows: AsyncRowBatches, count: int, *, endless: bool) -> None:
        self._rows = rows
        self._count = count
        self._stream = iter(rows) if endless else None

    def __len__(self) -> int:
        return self._count

    def _iterate(self) -> Iterator[Any]:
        stream = iter(self._rows) if self._stream is None else self._stream
        yield from itertools.islice(stream, self._count)

    def _process_batch(self, batch: Any) -> Any:
        return {name: _tensor(name, values) for name, values in batch.items()}

    def close(self) -> None:
        """End the thread that reads ahead."""
        self._rows.close_async_loader()


def _tensor(name: str, values: Any) -> torch.Tensor:
    require_numbers(name, values)
    return torch.as_tensor(values)


def even_batch_size(rows: int, size: int, batch_size: int) -> int:
    """The smallest number of rows, from `batch_size`, with which all ranks' shares make as many batches."""
    least, most = rows // size, -(-rows // size)
    while -(-least // batch_size) != -(-most // batch_size):
        batch_size += 1
    return batch_size


def _batches(job: Job, *, training: bool) -> Batches:
    values, size, rank = job.values, hvd.size(), hvd.rank()
    batch_size = job.batch_size(training=training)
    if training:
        count = values["train_steps_per_epoch"] or max(1, job.train_rows // (batch_size * size))
        queue = values["train_async_data_loader_queue_size"]
    else:
        if job.val_rows < size:  # each rank takes all of them
            size, rank = 1, 0
        batch_size = even_batch_size(job.val_rows, size, batch_size)
        count = math.ceil(math.ceil(job.val_rows / size) / batch_size)
        count = min(count, values["validation_steps_per_epoch"] or count)
        queue = values["val_async_data_loader_queue_size"]
    if queue is None:
        queue = READ_AHEAD
    elif isinstance(queue, float):
        queue = max(1, int(queue * count))
    rows = job.rows(
        rank,
        size,
        training=training,
        ahead=queue,
        batch_size=batch_size,
        is_logged=bool(values["debug_data_loader"]),
    )
    return Batches(rows, count, endless=training)


def _module(job: Job, package: str) -> Any:
    values = job.values
    model = values["model"]
    if isinstance(model, tuple):
        model = torch.jit.load(io.BytesIO(model[1]))  # type: ignore[no-untyped-call]
    if is_lightning_module(model):
        return model
    optimizer = values["optimizer"]
    adopt(optimizer, model)
    losses = values["loss"]
    if losses is None:
        names = {**values, "model": model, "optimizer": optimizer}
        losses = [make(**names) for make in values["loss_constructors"]]
    return to_lightning_module(
        model,
        optimizer,
        losses,
        values["loss_weights"],
        values["feature_cols"],
        values["label_cols"],
        values["sample_weight_col"],
        values["validation"],
        values["input_shapes"],
        values["label_shapes"],
        package,
    )


def _fit(job: Job, folder: str) -> Any:
    values = job.values
    given = dict(values["trainer_args"] or {})
    callbacks = given.pop("callbacks", values["callbacks"]) or []
    callbacks = list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]
    package = package_of([values["model"], *callbacks])
    lightning: Any = importlib.import_module(package)
    if values["random_seed"] is not None:
        lightning.seed_everything(values["random_seed"], verbose=False)
    device = own_device(values["use_gpu"] and values["num_gpus"] != 0)
    devices = hvd.allgather_object(device.type)
    if len(set(devices)) > 1:
        raise RuntimeError(
            f"All ranks don't have same device type! By rank: {devices}; use_gpu=False trains on CPUs"
        )
    module = _module(job, package)
    saver = _saver(lightning, job, folder)
    keep = given.get("enable_checkpointing", True)
    best = _place_checkpoints(lightning, callbacks, folder, job) if keep else None
    options = {} if (c := values["gradient_compression"]) is None else {"compression": c}
    epochs = values["epochs"]
    resume: dict[str, Any] = {}
    if job.checkpoint is not None:
        path = os.path.join(folder, "resumed.ckpt")
        with open(path, "wb") as file:
            file.write(job.checkpoint)
        content = torch.load(path, map_location="cpu", weights_only=False)
        epochs += content["epoch"] + 1
        resume = {"ckpt_path": path}
    arguments: dict[str, Any] = {
        "accelerator": device.type,
        "devices": 1,
        "callbacks": [*callbacks, _reporter(lightning), *([saver] if keep else [])],
        "max_epochs": epochs,
        "logger": _logger(lightning, job, folder),
        "log_every_n_steps": values["log_every_n_steps"],
        "num_sanity_val_steps": 0,
        "enable_progress_bar": values["verbose"] > 1,
        "enable_model_summary": bool(values["verbose"]),
        "profiler": values["profiler"],
        "default_root_dir": folder,
        **given,
    }
    if values["terminate_on_nan"]:
        arguments["callbacks"] = [_nan_watch(lightning), *arguments["callbacks"]]
    trainer = lightning.Trainer(strategy=strategy_class(package)(**options), **arguments)
    training = _batches(job, training=True)
    validation = _batches(job, training=False) if job.val_rows else None
    try:
        trainer.fit(module, training, validation, **resume)
    finally:
        training.close()
        if validation is not None:
            validation.close()
    history = {name: float(value) for name, value in trainer.logged_metrics.items()}
    if hvd.rank() != 0:
        return None
    if best is not None and best.best_model_path:
        content = torch.load(best.best_model_path, map_location="cpu", weights_only=False)
        module.load_state_dict(content["state_dict"])
    trained = module if is_lightning_module(values["model"]) else module.model
    buffer = io.BytesIO()
    torch.save(trained.cpu().state_dict(), buffer)
    return history, buffer.getvalue()


def _reporter(lightning: Any) -> Any:
    class Reporter(lightning.Callback):
        def on_train_batch_end(
            self, trainer: Any, _module: Any, _outputs: Any, _batch: Any, index: int
        ) -> None:
            progress.report(
                index + 1,
                trainer.num_training_batches,
                epoch=trainer.current_epoch,
                epochs=trainer.max_epochs,
            )

    return Reporter()


def _logger(lightning: Any, job: Job, folder: str) -> Any:
    logger = job.values["logger"]
    loggers: Any = importlib.import_module(f"{lightning.__name__}.loggers")
    if logger is None:
        if not job.store.saving_runs():
            return False
        name = job.store.get_logs_subdir()
        for kind in _LOGGERS:
            try:
                return getattr(loggers, kind)(folder, name=name, version="")
            except ModuleNotFoundError:
                continue
    if any(isinstance(logger, getattr(loggers, kind)) for kind in _LOGGERS):
        logger._root_dir = folder
        logger._name = job.store.get_logs_subdir()
    return logger


def _place_checkpoints(lightning: Any, callbacks: list[Any], folder: str, job: Job) -> Any:
    """Let the user's ModelCheckpoint write where files are copied to the store from."""
    kind = importlib.import_module(f"{lightning.__name__}.callbacks").ModelCheckpoint
    for callback in callbacks:
        if isinstance(callback, kind):
            callback.dirpath = os.path.join(folder, "checkpoints")
            if callback.filename is None:
                callback.filename = job.store.get_checkpoint_filename()
            return callback
    return None


def _saver(lightning: Any, job: Job, folder: str) -> Any:
    """A callback that writes a checkpoint into the store after each epoch, and copies logs there."""
    callbacks: Any = importlib.import_module(f"{lightning.__name__}.callbacks")
    store = job.store
    verbose = job.values["verbose"]

    class Saver(callbacks.Checkpoint):  # type: ignore[misc,unused-ignore]
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            # Reading them may reduce them, which all ranks have to do.
            found = {name: float(value) for name, value in trainer.callback_metrics.items()}
            if verbose and trainer.is_global_zero:
                print(f"epoch {trainer.current_epoch}: {found}", flush=True)  # noqa: T201
            if not store.saving_runs():
                return
            path = os.path.join(folder, "last.ckpt.part")
            trainer.save_checkpoint(path)  # all ranks take part, the first one writes
            if trainer.is_global_zero:
                place = f"{store.get_checkpoint_path(job.run_id)}/{store.get_checkpoint_filename()}"
                with open(path, "rb") as file:
                    store.write_bytes(place, file.read())
                os.remove(path)
                self._copy(trainer)

        def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
            if store.saving_runs() and trainer.is_global_zero:
                self._copy(trainer)

        def _copy(self, trainer: Any) -> None:
            for logger in trainer.loggers:
                logger.save()
            for name in ("checkpoints", store.get_logs_subdir()):
                if os.path.isdir(part := os.path.join(folder, name)):
                    target = f"{store.get_run_path(job.run_id)}/{name}"
                    store.copy(part, target, recursive=True)

    return Saver()


def _nan_watch(lightning: Any) -> Any:
    class NanWatch(lightning.Callback):  # type: ignore[misc,unused-ignore]
        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            if loss is not None and not torch.isfinite(torch.as_tensor(loss)).all():
                raise ValueError(
                    f"the loss of batch {batch_idx} is {float(loss)}, and terminate_on_nan is set"
                )

    return NanWatch()
