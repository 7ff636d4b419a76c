"""Keras callbacks that tell the driver how training goes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

import horovod.tensorflow.keras as hvd
from horovod import progress
from horovod.spark._horovod_runner import log_to_driver

keras: Any = tf.keras


class LogCallback(keras.callbacks.Callback):
    """Shows on the driver what rank 0 knows at the end of each epoch: its time and its metrics.

    Parameters
    ----------
    per_batch_log
        Also at the end of each batch.
    """

    def __init__(self, per_batch_log: bool = False) -> None:
        super().__init__()
        self._per_batch = per_batch_log
        self._epoch = 0
        self._since = 0.0

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Remember when it began."""
        self._epoch, self._since = epoch, time.monotonic()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Tell of the epoch."""
        took = time.monotonic() - self._since
        self._tell(f"epoch {self._counted()} in {took:.1f} s", logs)

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Tell of the batch, if that is wanted."""
        if self._per_batch:
            steps = self.params.get("steps")
            of = f"/{steps}" if steps else ""
            self._tell(f"epoch {self._counted()} batch {batch + 1}{of}", logs)

    def _counted(self) -> str:
        epochs = self.params.get("epochs")
        return f"{self._epoch + 1}/{epochs}" if epochs else str(self._epoch + 1)

    def _tell(self, what: str, logs: Mapping[str, Any] | None) -> None:
        if not hvd.is_initialized() or hvd.rank() == 0:
            metrics = [f"{name} {float(value):.4g}" for name, value in (logs or {}).items()]
            log_to_driver(", ".join([what, *metrics]))


class ProgressCallback(keras.callbacks.Callback):
    """Reports how far this rank is; where the driver has a terminal or a notebook, it shows a bar."""

    def __init__(self) -> None:
        super().__init__()
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Remember which."""
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Report."""
        progress.report(
            batch + 1,
            self.params.get("steps"),
            epoch=self._epoch,
            epochs=self.params.get("epochs"),
            **(logs or {}),
        )
