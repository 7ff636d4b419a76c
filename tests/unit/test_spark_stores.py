"""Stores on a local folder and on fsspec's file system in memory."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("fsspec")
pytest.importorskip("pyarrow")

from horovod.spark.common.store import DBFSLocalStore, FilesystemStore, Store


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> FilesystemStore:
    prefix = str(tmp_path / "s") if request.param == "local" else f"memory://{tmp_path.name}"
    made = Store.create(prefix)
    assert isinstance(made, FilesystemStore)
    return made


def test_paths_files_and_sync(store: FilesystemStore, tmp_path: Path) -> None:
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
