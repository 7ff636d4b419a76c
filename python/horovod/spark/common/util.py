"""Preparation of a DataFrame for training: checks, split, and Parquet files in a store."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from horovod.runner.common.util import host_hash as _host_hash
from horovod.spark.common.store import check_store

__all__ = [
    "check_validation",
    "clear_training_cache",
    "get_dataset_properties",
    "get_simple_meta_from_parquet",
    "host_hash",
    "is_databricks",
    "prepare_data",
    "to_list",
]

# Small enough that a reader holds little, large enough that files stay efficient.
_ROW_GROUP_BYTES = 16 << 20


@dataclass
class _Prepared:
    frame: weakref.ref[Any]
    key: tuple[Any, ...]


_lock = threading.Lock()
_prepared: dict[tuple[str, int], _Prepared] = {}
_in_use: dict[tuple[str, int], int] = {}


def is_databricks() -> bool:
    """Whether this runs on Databricks."""
    return "DATABRICKS_RUNTIME_VERSION" in os.environ


def host_hash(salt: str | None = None) -> str:
    """The runner's name for this host; containers of YARN on one machine, which CONTAINER_ID names, differ too."""
    parts = [part for part in (os.environ.get("CONTAINER_ID"), salt) if part]
    return _host_hash.host_hash("-".join(parts) or None)


def to_list(value: Any, length: int) -> list[Any] | None:
    """A list as it is, but one of a single element, and anything else but None, repeated `length` times."""
    if value is None:
        return None
    several = value if isinstance(value, list) else [value]
    return several * length if len(several) == 1 else several


def check_validation(validation: Any, df: Any = None) -> None:
    """Raise unless `validation` is None, a share from 0 to 1, or a column of the DataFrame."""
    if validation is None:
        return
    if isinstance(validation, float):
        if not 0 <= validation < 1:
            raise ValueError(f"validation: expected a share from 0 to below 1, got {validation}")
    elif isinstance(validation, str):
        if df is not None and validation not in df.columns:
            raise ValueError(
                f"validation: the DataFrame has no column {validation!r}; it has {', '.join(df.columns)}"
            )
    else:
        raise ValueError(f"validation must be of type float or str, got {validation!r}")


def clear_training_cache() -> None:
    """Forget which DataFrames are already prepared; the files stay."""
    with _lock:
        _prepared.clear()


@contextmanager
def prepare_data(
    num_processes: int,
    store: Any,
    df: Any,
    label_columns: Sequence[str],
    feature_columns: Sequence[str],
    validation: Any = None,
    sample_weight_col: str | None = None,
    compress_sparse: bool = False,
    partitions_per_process: int = 10,
    verbose: int = 0,
    random_seed: int | None = None,
) -> Iterator[int]:
    """Write a DataFrame's columns as Parquet into the store; yield the index of that data set.

    The same DataFrame with the same arguments is written once in a process. Within the block no other call takes
    the index.

    Parameters
    ----------
    num_processes
        Number of ranks that will read.
    store, df
        Where to, and what.
    label_columns, feature_columns, sample_weight_col
        The columns to keep.
    validation
        The share of rows to validate with, or the name of a column that tells: true or above 0.
    compress_sparse
        Whether to keep vectors as they are, which is smaller for sparse ones; batches are dense all the same.
    partitions_per_process
        How many files per rank, at most.
    verbose
        Whether to say what is written.
    random_seed
        For the random split; None for another one each time.

    Raises
    ------
    ValueError
        A column is missing, has nulls or values of several lengths, or there are too few rows.
    """
    if num_processes < 1 or partitions_per_process < 1:
        raise ValueError(
            f"expected at least one process and one partition, got {num_processes} and {partitions_per_process}"
        )
    check_store(store)
    columns = _columns(df, label_columns, feature_columns, validation, sample_weight_col)
    ratio = validation if isinstance(validation, float) else None
    key = (tuple(columns), validation, sample_weight_col, compress_sparse, random_seed)
    where = store.get_train_data_path()
    with _lock:
        idx = _index_of(df, key, store, where)
        slot = (where, idx)
        if slot not in _prepared:
            _write(
                num_processes,
                store,
                df.select(*columns),
                idx,
                validation if isinstance(validation, str) else ratio,
                compress_sparse,
                partitions_per_process,
                random_seed,
            )
            _check_written(store, idx, num_processes, bool(validation))
            _prepared[slot] = _Prepared(weakref.ref(df), key)
            if verbose:
                print(f"wrote training data to {store.get_train_data_path(idx)}", flush=True)  # noqa: T201
        _in_use[slot] = _in_use.get(slot, 0) + 1
    try:
        yield idx
    finally:
        with _lock:
            _in_use[slot] -= 1


def _columns(
    df: Any,
    label_columns: Sequence[str] | None,
    feature_columns: Sequence[str] | None,
    validation: Any,
    sample_weight_col: str | None,
) -> list[str]:
    check_validation(validation, df)
    for name, given in (("label_cols", label_columns), ("feature_cols", feature_columns)):
        if not given:
            raise ValueError(f"{name}: expected a list of columns, got {given!r}")
        if isinstance(given, str):
            raise ValueError(f"{name}: expected a list of columns, got the text {given!r}")
    columns = [*(feature_columns or ()), *(label_columns or ())]
    if sample_weight_col:
        columns.append(sample_weight_col)
    if isinstance(validation, str):
        columns.append(validation)
    missing = [name for name in columns if name not in df.columns]
    if missing:
        raise ValueError(
            f"the DataFrame has no column {', '.join(map(repr, missing))}; it has {', '.join(df.columns)}"
        )
    return list(dict.fromkeys(columns))


def _index_of(df: Any, key: tuple[Any, ...], store: Any, where: str) -> int:
    """The index of what is prepared already, else the smallest that nobody uses."""
    for (path, idx), entry in list(_prepared.items()):
        if path == where and entry.frame() is df and entry.key == key:
            if store.exists(store.get_train_data_path(idx)):
                return idx
            del _prepared[path, idx]
    idx = 0
    while _in_use.get((where, idx)):
        idx += 1
    _prepared.pop((where, idx), None)
    return idx


def _write(
    num_processes: int,
    store: Any,
    frame: Any,
    idx: int,
    validation: Any,
    compress_sparse: bool,
    partitions_per_process: int,
    random_seed: int | None,
) -> None:
    from pyspark.ml.functions import vector_to_array
    from pyspark.ml.linalg import VectorUDT
    from pyspark.sql import functions as F
    from pyspark.sql.types import BooleanType

    kinds = {field.name: field.dataType for field in frame.schema.fields}
    if not compress_sparse:
        for name, kind in kinds.items():
            if isinstance(kind, VectorUDT):
                frame = frame.withColumn(name, vector_to_array(name))
    total = num_processes * partitions_per_process
    parts: list[tuple[str, Any, int]] = []
    if not validation:
        parts.append((store.get_train_data_path(idx), frame, total))
    elif isinstance(validation, str):
        chosen = F.col(validation)
        if not isinstance(kinds[validation], BooleanType):
            chosen = chosen > 0
        rest = frame.filter(~chosen).drop(validation)
        parts.append((store.get_train_data_path(idx), rest, total))
        parts.append((store.get_val_data_path(idx), frame.filter(chosen).drop(validation), total))
    else:
        rest, validation_rows = frame.randomSplit([1 - validation, validation], random_seed)
        shares = int(total * (1 - validation)), int(total * validation)
        parts.append((store.get_train_data_path(idx), rest, max(shares[0], num_processes)))
        parts.append((store.get_val_data_path(idx), validation_rows, max(shares[1], num_processes)))
    for path, part, count in parts:
        writer = part.coalesce(count).write.mode("overwrite")
        writer.option("parquet.block.size", _ROW_GROUP_BYTES).parquet(path)


def _check_written(store: Any, idx: int, num_processes: int, has_val: bool) -> None:
    paths = [(store.get_train_data_path(idx), "training")]
    if has_val:
        paths.append((store.get_val_data_path(idx), "Validation"))
    for path, what in paths:
        data = store.get_parquet_dataset(path)
        if what == "Validation":
            if not data.rows:
                raise ValueError(
                    "Validation DataFrame is empty; give a larger share, or a column that marks some rows"
                )
        else:
            check_rows(data.rows, num_processes)
        if data.null_columns:
            raise ValueError(
                f"the {what.lower()} data has null values in column "
                f"{', '.join(map(repr, sorted(data.null_columns)))}; remove such rows or fill them (DataFrame.fillna)"
            )
        _check_lengths(path, data.schema)


def check_rows(rows: int, num_processes: int) -> None:
    """Raise ValueError unless every rank has a row to train on."""
    if not rows:
        raise ValueError("No rows found in the training data; check the DataFrame and `validation`")
    if rows < num_processes:
        raise ValueError(
            f"the training data has {rows} rows for {num_processes} ranks, and every rank needs at least one; "
            "use fewer ranks (num_proc)"
        )


def _check_lengths(path: str, schema: Any) -> None:
    import pyarrow as pa
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as F

    lists = [field.name for field in schema if pa.types.is_list(field.type)]
    if not lists:
        return
    session = SparkSession.active()
    sizes = [bound(F.size(name)) for name in lists for bound in (F.min, F.max)]
    row = session.read.parquet(path).agg(*sizes).first()
    for number, name in enumerate(lists):
        low, high = row[2 * number], row[2 * number + 1]
        if low != high:
            raise ValueError(
                f"column {name!r} does not have uniform shape: its rows have from {low} to {high} values; "
                "pad or cut them to one length"
            )


def _spark_type(kind: Any) -> Any:
    import numpy as np
    import pyarrow as pa
    from pyspark.ml.linalg import DenseVector

    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_struct(kind):
        return DenseVector
    if pa.types.is_boolean(kind):
        return bool
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return str
    if pa.types.is_decimal(kind):
        return Decimal
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return bytes
    return np.dtype(kind.to_pandas_dtype()).type


def get_simple_meta_from_parquet(
    store: Any,
    label_columns: Sequence[str],
    feature_columns: Sequence[str],
    sample_weight_col: str | None = None,
    dataset_idx: int | None = None,
) -> tuple[int, int, dict[str, Any], float]:
    """Numbers of rows to train and to validate with, what is known of the columns, and bytes per row.

    All from the footers of the files.
    """
    import numpy as np

    train_path = store.get_train_data_path(dataset_idx)
    if not store.exists(train_path):
        raise ValueError(
            f"{train_path} path does not exist in the store; call fit(df), or prepare_data, or write it yourself"
        )
    train = store.get_parquet_dataset(train_path)
    if not train.rows:
        raise ValueError(f"No rows found in {train_path}")
    columns = [*feature_columns, *label_columns]
    if sample_weight_col:
        columns.append(sample_weight_col)
    train.require(columns)
    val_rows = 0
    val_path = store.get_val_data_path(dataset_idx)
    if store.exists(val_path):
        val = store.get_parquet_dataset(val_path)
        val.require(columns)
        val_rows = val.rows
    first = next(train.first_rows(columns))
    metadata = {
        name: {
            "spark_data_type": _spark_type(train.schema.field(name).type),
            "is_sparse_vector_only": False,
            "shape": first[name].shape[1:] or None,
            "intermediate_format": "nochange",
            "max_size": int(np.size(first[name][0])),
        }
        for name in columns
    }
    return train.rows, val_rows, metadata, train.bytes / train.rows


def get_dataset_properties(dataset_idx: int, store: Any) -> tuple[int, int, float]:
    """Numbers of rows to train and to validate with, and bytes per row."""
    train = store.get_parquet_dataset(store.get_train_data_path(dataset_idx))
    val_path = store.get_val_data_path(dataset_idx)
    val_rows = store.get_parquet_dataset(val_path).rows if store.exists(val_path) else 0
    return train.rows, val_rows, train.bytes / max(1, train.rows)
