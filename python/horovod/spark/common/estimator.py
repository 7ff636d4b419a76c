"""Base classes of the estimators and of the models that they return."""

from __future__ import annotations

import time
from typing import Any

from pyspark.ml import Estimator, Model

from horovod.spark.common.backend import Backend, SparkBackend
from horovod.spark.common.job import Job, require_number_columns
from horovod.spark.common.params import EstimatorParams, ModelParams
from horovod.spark.common.serialization import Saved, require_picklable
from horovod.spark.common.store import check_store
from horovod.spark.common.util import (
    check_rows,
    check_validation,
    get_simple_meta_from_parquet,
    prepare_data,
)


class HorovodEstimator(Saved, EstimatorParams, Estimator):
    """Fits a model to a DataFrame on several ranks."""

    def _fit(self, dataset: Any) -> Any:
        self._check_params()
        self._check_types(dataset)
        backend = self._get_or_create_backend()
        with prepare_data(
            backend.num_processes(),
            self.getStore(),
            dataset,
            label_columns=self.getLabelCols(),
            feature_columns=self.getFeatureCols(),
            validation=self.getValidation(),
            sample_weight_col=self.getSampleWeightCol(),
            compress_sparse=self.getCompressSparseCols(),
            partitions_per_process=self.getPartitionsPerProcess(),
            verbose=self.getVerbose(),
            random_seed=self.getRandomSeed(),
        ) as idx:
            return self._fit_on_data(backend, idx)

    def fit_on_parquet(
        self, params: dict[Any, Any] | None = None, dataset_idx: int | None = None
    ) -> Any:
        """Fit to Parquet files that are in the store already.

        Without an index they are at `store.get_train_data_path()` and, for validation, `get_val_data_path()`.
        """
        if params:
            return self.copy(params).fit_on_parquet(dataset_idx=dataset_idx)
        self._check_params()
        return self._fit_on_data(self._get_or_create_backend(), dataset_idx)

    def _fit_on_data(self, backend: Backend, idx: int | None) -> Any:
        train_rows, val_rows, metadata, _ = get_simple_meta_from_parquet(
            self.getStore(),
            self.getLabelCols(),
            self.getFeatureCols(),
            self.getSampleWeightCol(),
            idx,
        )
        check_rows(train_rows, backend.num_processes())
        if idx is not None and not self.getValidation():
            val_rows = 0  # what is there is an earlier data set's
        return self._fit_on_prepared_data(backend, train_rows, val_rows, metadata, idx)

    def _fit_on_prepared_data(
        self,
        backend: Backend,
        train_rows: int,
        val_rows: int,
        metadata: dict[str, Any],
        dataset_idx: int | None,
    ) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has to define _fit_on_prepared_data")

    def _check_params(self) -> None:
        if self.getModel() is None:
            raise ValueError("Model parameter is required")
        for name in ("feature_cols", "label_cols"):
            if not self.value_of(name):
                raise ValueError(f"{name}: expected a list of columns, got {self.value_of(name)!r}")
        check_validation(self.getValidation())
        check_store(self.getStore())

    def _check_types(self, df: Any) -> None:
        """Raise TypeError if a column holds no numbers, and nothing makes them of it."""
        columns = [*self.getFeatureCols(), *self.getLabelCols()]
        if self.getSampleWeightCol():
            columns.append(self.getSampleWeightCol())
        if self.getTransformationFn() is None:
            # `prepare_data` reports missing columns.
            require_number_columns(df.schema, [name for name in columns if name in df.columns])

    def _check_lengths(self, *names: str) -> None:
        """Raise unless parameters that are lists have one element for each label column; one loss is for all."""
        labels = self.getLabelCols()
        for name in names:
            value = self.value_of(name)
            if (
                name in ("loss", "loss_constructors")
                and isinstance(value, list)
                and len(value) == 1
            ):
                continue
            if isinstance(value, list) and len(value) != len(labels):
                raise ValueError(
                    f"{name}: expected one for each of the {len(labels)} label columns, got {len(value)}"
                )

    def _values(self) -> dict[str, Any]:
        """All parameters that ranks get."""
        return {
            param.name: self.getOrDefault(param)
            for param in self.params
            if param.name not in ("store", "backend")
        }

    def _job(
        self,
        values: dict[str, Any],
        run_id: str,
        train_rows: int,
        val_rows: int,
        dataset_idx: int | None,
    ) -> Job:
        """The job for the ranks; TypeError if a value cannot be sent."""
        require_picklable(type(self).__name__, values)
        return Job(
            values=values,
            store=self.getStore(),
            run_id=run_id,
            dataset_idx=dataset_idx,
            train_rows=train_rows,
            val_rows=val_rows,
            checkpoint=self._checkpoint(run_id),
        )

    def _get_or_create_backend(self) -> Backend:
        backend, num_proc = self.getBackend(), self.getNumProc()
        if backend is None:
            return SparkBackend(num_proc, verbose=self.getVerbose())
        if num_proc is not None:
            raise ValueError('At most one of parameters "backend" and "num_proc" may be specified')
        found: Backend = backend
        return found

    def _new_run_id(self, prefix: str) -> str:
        given: str | None = self.getRunId()
        return given or f"{prefix}_{int(time.time())}"

    def _checkpoint(self, run_id: str) -> bytes | None:
        """The checkpoint that a run of this name has left."""
        store = self.getStore()
        folder = store.get_checkpoint_path(run_id)
        if folder is None:
            return None
        path = f"{folder}/{store.get_checkpoint_filename()}"
        return store.read(path) if store.exists(path) else None


class HorovodModel(Saved, ModelParams, Model):
    """A trained model, which adds its predictions to a DataFrame."""

    def setOutputCols(self, value: list[str]) -> Any:
        """Set the names of the columns that `transform` adds; returns the model."""
        self._set(outputCols=value)
        return self

    def _output_columns(self, df: Any) -> list[str]:
        names: list[str] = self.getOutputCols()
        if len(names) != len(self.getLabelColumns()):
            raise ValueError("Number of output columns must equal to number of label columns.")
        taken = [name for name in names if name in df.columns]
        if taken:
            raise ValueError(
                f"the DataFrame already has a column {', '.join(map(repr, taken))}; choose others by setOutputCols"
            )
        missing = [name for name in self.getFeatureColumns() if name not in df.columns]
        if missing:
            raise ValueError(
                f"the DataFrame has no column {', '.join(map(repr, missing))}; it has {', '.join(df.columns)}"
            )
        return names
