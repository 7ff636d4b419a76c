"""An estimator's job for its ranks, and their access to the rows, for all frameworks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from horovod import _core
from horovod.spark.common.row_reader import AsyncRowBatches
from horovod.spark.task import get_available_devices

_BY_LOCAL_RANK = "HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX"
READ_AHEAD = 8  # batches


@dataclass
class Job:
    """All that a rank is told."""

    values: dict[str, Any]  # of the estimator's parameters
    store: Any
    run_id: str
    dataset_idx: int | None
    train_rows: int
    val_rows: int
    checkpoint: bytes | None

    @contextlib.contextmanager
    def begun(self, hvd: Any) -> Iterator[None]:
        """Be a rank in this block. If it raises, the other ranks hear of an exception, not of a shutdown."""
        self._set_start_method()
        hvd.init()
        try:
            yield
        except BaseException:
            _core.leave_interrupted()
            raise
        hvd.shutdown()

    def _set_start_method(self) -> None:
        """Have `multiprocessing` start processes as `mp_start_method` says."""
        method = self.values["mp_start_method"]
        if method:
            import multiprocessing

            multiprocessing.set_start_method(method, force=True)

    def batch_size(self, *, training: bool) -> int:
        """Rows in a batch of one rank."""
        size: int = self.values["batch_size"]
        return size if training else self.values["val_batch_size"] or size

    def rows(
        self,
        rank: int,
        size: int,
        *,
        training: bool,
        ahead: int,
        batch_size: int | None = None,
        is_logged: bool = False,
    ) -> AsyncRowBatches:
        """The batches of a rank's share, read ahead; those to train on have no end."""
        values, store = self.values, self.store
        idx = self.dataset_idx
        path = store.get_train_data_path(idx) if training else store.get_val_data_path(idx)
        columns = [*values["feature_cols"], *values["label_cols"]]
        if values["sample_weight_col"]:
            columns.append(values["sample_weight_col"])
        return AsyncRowBatches(
            ahead,
            is_logged,
            store.get_parquet_dataset(path),
            batch_size or self.batch_size(training=training),
            list(dict.fromkeys(columns)),
            rank=rank,
            size=size,
            shuffle=training and values["shuffle"],
            seed=values["random_seed"] or 0,
            repeat=training,
            transform=values["transformation_fn"],
            cache=values["inmemory_cache_all"],
        )


def gpu_of_rank(local_rank: int) -> int:
    """Number of the GPU that a rank of an estimator uses: the first that Spark gave to its task, else its local rank.

    HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX, if it is set and not 0, says that what Spark gave does not count, as where
    each task sees GPUs of its own only.
    """
    assigned = get_available_devices()
    if not assigned or os.environ.get(_BY_LOCAL_RANK, "0") != "0":
        return local_rank
    if not assigned[0].isdecimal():
        raise ValueError(
            f"Spark gave this rank the GPU {assigned[0]!r}, which is no number: set {_BY_LOCAL_RANK}=1 to choose by "
            "the local rank"
        )
    return int(assigned[0])


def require_numbers(name: str, values: Any) -> None:
    """Raise TypeError unless a column's values are numbers or booleans."""
    if values.dtype.kind not in "bifu":
        kind = values.dtype.name
        if kind == "object" and values.size:
            kind = type(values.flat[0]).__name__
        raise _no_numbers(name, kind)


def require_number_columns(schema: Any, columns: Iterable[str]) -> None:
    """Raise TypeError unless these columns of a DataFrame hold numbers, booleans, lists of them or vectors."""
    from pyspark.sql import types

    for name in columns:
        kind = schema[name].dataType
        while isinstance(kind, types.ArrayType):
            kind = kind.elementType
        # Vectors are a type that its user has defined.
        is_known = isinstance(kind, types.NumericType | types.BooleanType | types.UserDefinedType)
        if not is_known or isinstance(kind, types.DecimalType):
            raise _no_numbers(name, schema[name].dataType.simpleString())


def _no_numbers(name: str, kind: str) -> TypeError:
    return TypeError(
        f"column {name!r} has the type {kind}; expected numbers, booleans, lists of them or vectors: encode text "
        "(StringIndexer of pyspark.ml.feature), cast decimals and dates (column.cast('double')), decode binary values "
        "to lists of numbers, or give a transformation_fn that does"
    )
