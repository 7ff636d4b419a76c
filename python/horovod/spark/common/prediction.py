"""Predictions of a model as columns of a DataFrame, a batch of rows at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

_ROWS = 256

# Opens the model on an executor: a function of feature arrays to one array per output.
Opener = Callable[[], Callable[[list[Any]], list[Any]]]


def add_predictions(
    df: Any, open_model: Opener, features: list[str], labels: list[str], outputs: list[str]
) -> Any:
    """The DataFrame with one more column per output.

    Predictions that are one number per row have the label's type, if it is a numeric column of the DataFrame, else
    double; several numbers per row are a vector.
    """
    from pyspark.ml.linalg import VectorUDT
    from pyspark.sql.types import DoubleType, NumericType, StructField, StructType

    kinds = {field.name: field.dataType for field in df.schema.fields}
    first = df.select(*features).take(1)
    if first:
        samples = open_model()(_feature_arrays(first, features))
        is_vector = [sample.reshape(1, -1).shape[1] > 1 for sample in samples]
    else:
        is_vector = [False] * len(outputs)
    if len(is_vector) != len(outputs):
        raise ValueError(
            f"the model returns {len(is_vector)} outputs for {len(outputs)} label columns"
        )
    # A label that is a vector is predicted as one, also if it has one element.
    is_vector = [
        vector or isinstance(kinds.get(label), VectorUDT)
        for vector, label in zip(is_vector, labels, strict=True)
    ]
    fields, whole = [], []
    for name, label, vector in zip(outputs, labels, is_vector, strict=True):
        kind = kinds.get(label)
        numeric = isinstance(kind, NumericType)
        is_whole = numeric and type(kind).__name__ in (
            "ByteType",
            "ShortType",
            "IntegerType",
            "LongType",
        )
        chosen: Any = VectorUDT() if vector else kind if numeric else DoubleType()
        fields.append(StructField(name, chosen, True))
        whole.append(is_whole)

    def predict(rows: Iterator[Any]) -> Iterator[tuple[Any, ...]]:
        from pyspark.ml.linalg import DenseVector

        model = None
        while part := list(itertools.islice(rows, _ROWS)):
            if model is None:
                model = open_model()
            columns = []
            for values, vector, integer in zip(
                model(_feature_arrays(part, features)), is_vector, whole, strict=True
            ):
                flat = np.asarray(values, dtype=np.float64).reshape(len(part), -1)
                if vector:
                    columns.append([DenseVector(row) for row in flat])
                elif integer:
                    columns.append([round(value) for value in flat[:, 0].tolist()])
                else:
                    columns.append(flat[:, 0].tolist())
            for row, *added in zip(part, *columns, strict=True):
                yield (*row, *added)

    schema = StructType([*df.schema.fields, *fields])
    return df.rdd.mapPartitions(predict).toDF(schema)


def _feature_arrays(rows: list[Any], features: list[str]) -> list[Any]:
    return [np.stack([_plain(row[name]) for row in rows]) for name in features]


def _plain(value: Any) -> Any:
    # A vector of Spark's, else numbers and lists of numbers.
    return value.toArray() if hasattr(value, "toArray") else np.asarray(value)
