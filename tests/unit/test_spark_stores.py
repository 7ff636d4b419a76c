"""Stores on a local folder, in memory, and behind the prefixes of services that are not there: HDFS, S3, Azure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fsspec")
pa = pytest.importorskip("pyarrow")

import pyarrow.parquet as pq  # noqa: E402
from fsspec.implementations.memory import MemoryFileSystem  # noqa: E402
from fsspec.registry import _registry  # noqa: E402

from horovod.spark.common.row_reader import RowBatches  # noqa: E402
from horovod.spark.common.store import (  # noqa: E402
    AbstractFilesystemStore,
    DBFSLocalStore,
    FilesystemStore,
    HDFSStore,
    LocalStore,
    Store,
)

# Prefix, and what fsspec's driver makes of it.
PLAYED = {
    "hdfs://namenode:9000/": "/",
    "hdfs:///": "/",
    "s3://bucket/": "bucket/",
    "gs://bucket/": "bucket/",
    "abfs://container/": "container/",
    "az://container/": "container/",
}


class Played(MemoryFileSystem):  # type: ignore[misc]
    """In memory, in place of the file system of another protocol."""

    protocol = ("hdfs", "s3", "gs", "abfs", "az")
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012
    options: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, **options: Any) -> None:
        Played.options = options
        super().__init__()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        protocol, found, rest = path.partition("://")
        if found and protocol == "hdfs":
            # The name of the host is no part of the path.
            rest = rest[rest.index("/") :]
        return "/" + (rest if found else path).strip("/")

    @classmethod
    def _get_kwargs_from_urls(cls, path: str) -> dict[str, Any]:
        return {}


@pytest.fixture(params=["local", "memory", *PLAYED])
def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AbstractFilesystemStore:
    match request.param:
        case "local":
            prefix = str(tmp_path / "s")
        case "memory":
            prefix = f"memory://{tmp_path.name}"
        case other:
            prefix = f"{other}{tmp_path.name}"
    for protocol in Played.protocol:
        monkeypatch.setitem(_registry, protocol, Played)
    made = Store.create(prefix, storage_options={"user": "me"} if "hdfs" in prefix else None)
    assert isinstance(made, HDFSStore if prefix.startswith("hdfs") else FilesystemStore)
    return made


def test_batches_are_read_from_it(store: AbstractFilesystemStore, tmp_path: Path) -> None:
    table = pa.table({"x": [[float(n), 1.0] for n in range(10)], "y": list(range(10))})
    pq.write_table(table, tmp_path / "part.parquet", row_group_size=3)
    store.copy(str(tmp_path / "part.parquet"), f"{store.get_train_data_path(0)}/part.parquet")
    assert store.is_parquet_dataset(store.get_train_data_path(0))
    data = store.get_parquet_dataset(store.get_train_data_path(0))
    rows = [list(RowBatches(data, 4, ["x", "y"], rank=rank, size=2)) for rank in range(2)]
    labels = [number for share in rows for batch in share for number in batch["y"].tolist()]
    assert labels == list(range(10))
    assert rows[1][0]["x"].tolist()[0] == [5.0, 1.0]


def test_options_of_hdfs_reach_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_registry, "hdfs", Played)
    options = {"host": "namenode", "port": 9000, "user": "me", "kerb_ticket": "/ticket"}
    made = HDFSStore("/data", driver="libhdfs3", **options)  # type: ignore[arg-type]
    assert made.get_train_data_path() == "hdfs:///data/intermediate_train_data"
    assert Played.options == options


def test_paths_of_a_store_on_databricks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "17.3")
    made = Store.create("dbfs:/team/runs")
    assert isinstance(made, DBFSLocalStore)
    assert made.get_train_data_path(1) == "file:///dbfs/team/runs/intermediate_train_data.1"
    assert made.get_localized_path(made.get_run_path("r")) == "/dbfs/team/runs/runs/r"
    assert made.get_checkpoint_filename() == "checkpoint.tf"
    # Elsewhere, and for other folders, it is a folder like any.
    assert not isinstance(Store.create("/tmp/a"), DBFSLocalStore)


def test_places_one_by_one(tmp_path: Path) -> None:
    made = LocalStore(train_path=str(tmp_path / "t"), val_path=str(tmp_path / "v"), save_runs=False)
    assert made.get_train_data_path() == f"file://{tmp_path}/t"
    assert made.get_val_data_path(3) == f"file://{tmp_path}/v.3"
    assert not made.saving_runs()
    assert made.get_checkpoint_path("run") is None
    assert made.get_logs_path("run") is None
    with pytest.raises(ValueError, match="without a path for that"):
        made.get_test_data_path()
    named = LocalStore(str(tmp_path), checkpoint_filename="last.keras")
    assert named.get_checkpoint_filename() == "last.keras"


def test_paths_files_and_sync(store: AbstractFilesystemStore, tmp_path: Path) -> None:
    assert store.get_train_data_path(2) == f"{store.prefix_path}/intermediate_train_data.2"
    path = f"{store.get_checkpoint_path('run')}/{store.get_checkpoint_filename()}"
    assert not store.exists(path)
    store.write_text(path, "one")
    store.write_text(path, "two")
    assert store.read(path) == b"two"
    folder = tmp_path / "local" / "logs"
    folder.mkdir(parents=True)
    (folder / "a.ckpt").write_text("a")
    store.to_remote("run", None).sync(str(tmp_path / "local"))
    assert store.read(f"{store.get_logs_path('run')}/a.ckpt") == b"a"
    assert store.read(path) == b"two"
    store.check_writable()
    assert not store.is_parquet_dataset(store.get_train_data_path())


def test_a_link_in_a_local_store_is_replaced_and_not_followed(tmp_path: Path) -> None:
    made, precious = LocalStore(str(tmp_path / "store")), tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "b").write_text("new")
    (tmp_path / "store").mkdir()
    for name in ("a", "b", "c"):
        (tmp_path / "store" / name).symlink_to(precious)
    made.write_text(f"{made.prefix_path}/a", "new")
    made.copy(str(tmp_path / "logs"), made.prefix_path, recursive=True)
    made.copy(str(tmp_path / "logs" / "b"), f"{made.prefix_path}/c")
    for name in ("a", "b", "c"):
        assert made.read(f"{made.prefix_path}/{name}") == b"new"
    assert precious.read_text() == "precious"


def test_databricks_paths() -> None:
    for path in ("/dbfs/a", "dbfs:/a", "file:/dbfs/a", "file:///dbfs/a"):
        assert DBFSLocalStore.normalize_path(path) == "/dbfs/a"
    with pytest.raises(ValueError, match="not a DBFS path"):
        DBFSLocalStore.normalize_path("/tmp/a")


def test_a_missing_driver_is_named() -> None:
    with pytest.raises(ValueError, match="install the package"):
        Store.create("nosuchscheme://a")
    with pytest.raises(TypeError, match="unknown arguments other"):
        Store.create("/tmp/a", other=1)
