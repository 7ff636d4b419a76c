"""Stores: where an estimator keeps its prepared data, checkpoints and logs."""

from __future__ import annotations

import contextlib
import os
import posixpath
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import fsspec
from fsspec.core import url_to_fs

from horovod.spark.common.row_reader import ParquetRows

_MISSING_DRIVER = (
    "{prefix}: {error}; install the package for it "
    "(s3fs for s3://, gcsfs for gs://, adlfs for abfs:// and az://)"
)


class Store:
    """Interface of every store; `Store.create` chooses a class by the prefix of a path."""

    @staticmethod
    def create(prefix_path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Store:
        """A store for a folder or URL.

        `hdfs://` gives an `HDFSStore`, a DBFS path on Databricks a `DBFSLocalStore`, anything else a
        `FilesystemStore`.
        """
        prefix = os.fspath(prefix_path)
        if HDFSStore.matches(prefix):
            return HDFSStore(prefix, *args, **kwargs)
        if "DATABRICKS_RUNTIME_VERSION" in os.environ and DBFSLocalStore.matches_dbfs(prefix):
            return DBFSLocalStore(prefix, *args, **kwargs)
        return FilesystemStore(prefix, *args, **kwargs)

    def get_train_data_path(self, idx: int | None = None) -> str:
        """Where training data is."""
        raise NotImplementedError

    def get_val_data_path(self, idx: int | None = None) -> str:
        """Where validation data is."""
        raise NotImplementedError


class AbstractFilesystemStore(Store):
    """A store with folders for data and runs below one prefix, or each where it is told."""

    def __init__(
        self,
        prefix_path: str | os.PathLike[str] | None = None,
        train_path: str | None = None,
        val_path: str | None = None,
        test_path: str | None = None,
        runs_path: str | None = None,
        save_runs: bool = True,
        storage_options: dict[str, Any] | None = None,
        checkpoint_filename: str | None = None,
        **kwargs: Any,
    ) -> None:
        if kwargs:
            raise TypeError(f"{type(self).__name__}: unknown arguments {', '.join(sorted(kwargs))}")
        self.storage_options = dict(storage_options or {})
        some_path = prefix_path if prefix_path is not None else train_path or runs_path
        if some_path is None:
            raise ValueError(f"{type(self).__name__}: give prefix_path, or train_path and val_path")
        try:
            self._fs, _ = url_to_fs(self._address(os.fspath(some_path)), **self.storage_options)
        except (ImportError, ValueError) as error:
            raise ValueError(_MISSING_DRIVER.format(prefix=some_path, error=error)) from error
        self.prefix_path = None if prefix_path is None else self.get_full_path(prefix_path)
        self._train_path = self._place(train_path, "intermediate_train_data")
        self._val_path = self._place(val_path, "intermediate_val_data")
        self._test_path = self._place(test_path, "intermediate_test_data")
        self._runs_path = self._place(runs_path, "runs")
        self._save_runs = save_runs and bool(self._runs_path)
        self._checkpoint_filename = checkpoint_filename or "checkpoint"

    def _place(self, given: str | None, name: str) -> str:
        if given is not None:
            return self.get_full_path(given)
        return posixpath.join(self.prefix_path, name) if self.prefix_path else ""

    def _address(self, path: str) -> str:
        """A path as fsspec takes it."""
        return path

    @property
    def fs(self) -> Any:
        """The fsspec file system."""
        return self._fs

    def get_full_path(self, path: str | os.PathLike[str]) -> str:
        """A path as a URL that Spark and fsspec both read; a local one is made absolute."""
        text = os.fspath(path)
        if "://" in text:
            return text.rstrip("/") if not text.endswith("://") else text
        if text.startswith("file:"):
            text = text.removeprefix("file:")
        return "file://" + os.path.abspath(text)

    def get_localized_path(self, path: str) -> str:
        """A URL without its scheme, as the file system names it."""
        return str(self._fs._strip_protocol(self._address(path)))

    def _data_path(self, path: str, idx: int | None) -> str:
        if not path:
            raise ValueError(f"{type(self).__name__}: this store was made without a path for that")
        return path if idx is None else f"{path}.{idx}"

    def get_train_data_path(self, idx: int | None = None) -> str:
        """Where training data is; with an index, that of one prepared data set."""
        return self._data_path(self._train_path, idx)

    def get_val_data_path(self, idx: int | None = None) -> str:
        """Where validation data is."""
        return self._data_path(self._val_path, idx)

    def get_test_data_path(self, idx: int | None = None) -> str:
        """Where test data is."""
        return self._data_path(self._test_path, idx)

    def saving_runs(self) -> bool:
        """Whether checkpoints and logs are kept."""
        return self._save_runs

    def get_runs_path(self) -> str:
        """The folder of all runs."""
        return self._runs_path

    def get_run_path(self, run_id: str) -> str:
        """The folder of one run."""
        return posixpath.join(self._runs_path, run_id)

    def get_checkpoint_path(self, run_id: str) -> str | None:
        """The folder of a run's checkpoints; None if none are kept."""
        return self.get_run_path(run_id) if self._save_runs else None

    def get_checkpoint_filename(self) -> str:
        """The name of the file that training resumes from."""
        return self._checkpoint_filename

    def get_checkpoints(self, run_id: str, suffix: str = ".ckpt") -> list[str]:
        """The checkpoint files of a run with a suffix, sorted."""
        path = self.get_localized_path(self.get_run_path(run_id))
        if not self._fs.isdir(path):
            return []
        return sorted(name for name in self._fs.ls(path, detail=False) if name.endswith(suffix))

    def get_logs_path(self, run_id: str) -> str | None:
        """The folder of a run's logs; None if none are kept."""
        path = self.get_run_path(run_id)
        return posixpath.join(path, self.get_logs_subdir()) if self._save_runs else None

    def get_logs_subdir(self) -> str:
        """The name of the folder of logs."""
        return "logs"

    def exists(self, path: str) -> bool:
        """Whether there is such a file or folder."""
        self._fs.invalidate_cache()
        return bool(self._fs.exists(self.get_localized_path(path)))

    def read(self, path: str) -> bytes:
        """The content of a file."""
        return bytes(self._fs.cat_file(self.get_localized_path(path)))

    def write_bytes(self, path: str, content: bytes) -> None:
        """Write a file whole: readers see the old content or the new one."""
        with self._whole(self.get_localized_path(path)) as part:
            self._fs.pipe_file(part, content)

    @contextlib.contextmanager
    def _whole(self, place: str) -> Iterator[str]:
        """Where to write a file so that it appears whole; a link at its place is replaced, not followed."""
        self._fs.makedirs(posixpath.dirname(place), exist_ok=True)
        if isinstance(self._fs, fsspec.get_filesystem_class("file")):
            part = f"{place}.{secrets.token_hex(8)}.part"
            try:
                yield part
                os.replace(part, place)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(part)
                raise
        else:
            yield place

    def write_text(self, path: str, text: str) -> None:
        """Write a file of text."""
        self.write_bytes(path, text.encode())

    def copy(self, lpath: str, rpath: str, recursive: bool = False, callback: Any = None) -> None:
        """Copy a local file or folder into the store; a folder is merged into one that exists."""
        del callback
        place = self.get_localized_path(rpath)
        if not recursive:
            with self._whole(place) as part:
                self._fs.put_file(lpath, part)
            return
        for folder, _, names in os.walk(lpath):
            for name in names:
                source = os.path.join(folder, name)
                target = posixpath.join(place, os.path.relpath(source, lpath))
                with self._whole(target) as part:
                    self._fs.put_file(source, part)

    def is_parquet_dataset(self, path: str) -> bool:
        """Whether a folder holds Parquet files."""
        try:
            return bool(self.get_parquet_dataset(path).groups)
        except (OSError, ValueError):
            return False

    def get_parquet_dataset(self, path: str) -> ParquetRows:
        """The Parquet files of a folder."""
        return ParquetRows(self.get_localized_path(path), self._fs)

    def check_writable(self) -> None:
        """Raise PermissionError or OSError, with advice, unless files can be written."""
        place = self.prefix_path or (self._runs_path if self._save_runs else None)
        if place is None:
            return
        probe = posixpath.join(place, f".horovod-{secrets.token_hex(8)}")
        try:
            self.write_bytes(probe, b"")
            self._fs.rm_file(self.get_localized_path(probe))
        except Exception as error:
            raise OSError(
                f"the store {place} cannot be written ({type(error).__name__}: {error}); "
                "choose a folder that this user may write and that executors share"
            ) from error

    def get_local_output_dir_fn(
        self, run_id: str
    ) -> Callable[[], contextlib.AbstractContextManager[str]]:
        """A function that makes a temporary folder for a worker, as a context manager."""

        @contextlib.contextmanager
        def local_folder() -> Iterator[str]:
            folder = tempfile.mkdtemp(prefix=f"{run_id}-")
            try:
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)

        return local_folder

    def sync_fn(self, run_id: str) -> Callable[[str], None]:
        """A function that copies a local folder into the run's folder."""
        path = self.get_run_path(run_id)

        def sync(local_folder: str) -> None:
            self.copy(local_folder, path, recursive=True)

        return sync

    def to_remote(self, run_id: str, dataset_idx: int | None) -> SimpleNamespace:
        """The workers' view of this store."""
        return SimpleNamespace(
            train_data_path=self.get_train_data_path(dataset_idx),
            val_data_path=self.get_val_data_path(dataset_idx),
            test_data_path=self._test_path and self.get_test_data_path(dataset_idx),
            saving_runs=self.saving_runs(),
            runs_path=self.get_runs_path(),
            run_path=self.get_run_path(run_id),
            checkpoint_path=self.get_checkpoint_path(run_id),
            logs_path=self.get_logs_path(run_id),
            checkpoint_filename=self.get_checkpoint_filename(),
            logs_subdir=self.get_logs_subdir(),
            get_local_output_dir=self.get_local_output_dir_fn(run_id),
            sync=self.sync_fn(run_id),
        )


class FilesystemStore(AbstractFilesystemStore):
    """A store in a local or shared folder, or in any place that fsspec has a driver for (`s3://`, `gs://`, `abfs://`).

    `storage_options` are the driver's own.
    """


class LocalStore(FilesystemStore):
    """A store in a folder that the driver and all executors see under one name."""


class HDFSStore(AbstractFilesystemStore):
    """A store in HDFS, by way of pyarrow, which needs a Hadoop client on the driver and executors.

    The prefix is `hdfs://host:port/path`, `hdfs:///path` or `/path`; `train_path` and `val_path` may take its place.
    """

    def __init__(
        self,
        prefix_path: str | None = None,
        *args: Any,
        host: str | None = None,
        port: int | None = None,
        user: str | None = None,
        kerb_ticket: str | None = None,
        driver: str | None = None,
        extra_conf: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        del driver  # pyarrow has one only
        options = {
            "host": host,
            "port": port,
            "user": user,
            "kerb_ticket": kerb_ticket,
            "extra_conf": extra_conf,
        }
        given = {name: value for name, value in options.items() if value is not None}
        kwargs["storage_options"] = {**given, **(kwargs.get("storage_options") or {})}
        super().__init__(prefix_path, *args, **kwargs)

    @classmethod
    def matches(cls, path: str) -> bool:
        """Whether a path is one of HDFS."""
        return path.startswith("hdfs://")

    def _address(self, path: str) -> str:
        return path if "://" in path else f"hdfs://{path}"

    def get_full_path(self, path: str | os.PathLike[str]) -> str:
        """A path as a URL of HDFS."""
        return self._address(os.fspath(path)).rstrip("/")


class DBFSLocalStore(FilesystemStore):
    """A store in the Databricks file system, through its mount `/dbfs`."""

    def __init__(self, prefix_path: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(self.normalize_path(prefix_path), *args, **kwargs)
        self._checkpoint_filename = "checkpoint.tf"

    @staticmethod
    def matches_dbfs(path: str) -> bool:
        """Whether a path is one of DBFS."""
        return path.startswith(("/dbfs/", "dbfs:/", "file:/dbfs/", "file:///dbfs/"))

    @classmethod
    def normalize_path(cls, path: str) -> str:
        """A path of DBFS as its mount shows it: `/dbfs/...`."""
        if not cls.matches_dbfs(path):
            raise ValueError(
                f"The provided path is not a DBFS path: {path}; expected /dbfs/..., dbfs:/... or file:///dbfs/..."
            )
        for scheme in ("dbfs:", "file:"):
            if path.startswith(scheme):
                path = "/" + path.removeprefix(scheme).lstrip("/")
                return path if scheme == "file:" else f"/dbfs{path}"
        return path

    def get_full_path(self, path: str | os.PathLike[str]) -> str:
        """A path as a URL below the mount."""
        text = os.fspath(path)
        return "file://" + (self.normalize_path(text) if self.matches_dbfs(text) else text)


def check_store(store: Any) -> None:
    """Raise unless there is a store, and it can be written."""
    if store is None:
        raise ValueError("Store parameter is required: pass store=Store.create('/a/shared/folder')")
    if isinstance(store, AbstractFilesystemStore):
        store.check_writable()
