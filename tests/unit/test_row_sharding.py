"""The reader of Parquet rows: shares, orders, memory, and the errors of bad columns."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

from horovod.spark.common.row_reader import (  # noqa: E402
    AsyncRowBatches,
    ParquetRows,
    RowBatches,
    RowGroup,
    column_to_numpy,
    shard_slices,
)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 40])
def test_shares_differ_by_one_row_at_most(size: int) -> None:
    groups = [RowGroup("a", 0, 17, 1), RowGroup("a", 1, 0, 1), RowGroup("b", 0, 5, 1)]
    seen = []
    counts = []
    for rank in range(size):
        rows = [
            (piece.group.path, piece.group.index, row)
            for piece in shard_slices(groups, rank, size)
            for row in range(piece.start, piece.stop)
        ]
        seen += rows
        counts.append(len(rows))
    assert len(seen) == len(set(seen)) == 22
    assert max(counts) - min(counts) <= 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    start = 0
    for name, count in (("a", 700), ("b", 13), ("c", 290)):
        numbers = np.arange(start, start + count)
        table = pa.table({"n": numbers, "v": [[float(n), -float(n)] for n in numbers]})
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=128)
        start += count
    (tmp_path / "_SUCCESS").touch()
    return tmp_path


def _read(folder: Path, **given: object) -> list[dict[str, np.ndarray]]:
    batches = AsyncRowBatches(2, False, ParquetRows(str(folder)), 50, ["n", "v"], **given)
    return list(batches)


def test_every_row_once_and_in_order(folder: Path) -> None:
    batches = [batch for rank in range(3) for batch in _read(folder, rank=rank, size=3)]
    assert np.concatenate([b["n"] for b in batches]).tolist() == list(range(1003))
    values = np.concatenate([b["v"] for b in batches])
    assert values.shape == (1003, 2)
    assert (values[:, 0] == -values[:, 1]).all()


def test_a_seed_gives_an_order_and_each_epoch_another(folder: Path) -> None:
    def first_epochs(seed: int) -> list[list[int]]:
        data = ParquetRows(str(folder))
        loader = RowBatches(data, 17, ["n"], shuffle=True, seed=seed, repeat=True)
        stream = iter(loader)
        epochs = [np.concatenate([next(stream)["n"] for _ in range(59)]).tolist() for _ in range(2)]
        stream.close()
        return epochs

    one, again, other = first_epochs(1), first_epochs(1), first_epochs(2)
    assert one == again
    assert one != other
    assert sorted(one[0]) == sorted(one[1]) == list(range(1003))
    assert one[0] != one[1]


def test_batches_span_epochs(folder: Path) -> None:
    loader = RowBatches(ParquetRows(str(folder)), 1500, ["n"], repeat=True)
    stream = iter(loader)
    assert [len(next(stream)["n"]) for _ in range(4)] == [1500] * 4
    stream.close()


def test_cached_rows_are_the_same(folder: Path) -> None:
    loader = RowBatches(ParquetRows(str(folder)), 50, ["n"], cache=True, shuffle=True)
    first = np.concatenate([b["n"] for b in loader])
    for path in folder.glob("*.parquet"):
        path.unlink()
    assert sorted(np.concatenate([b["n"] for b in loader])) == sorted(first)


def test_rows_are_transformed(folder: Path) -> None:
    batches = _read(folder, transform=lambda row: {"m": row["n"] * 2, "v": row["v"]})
    assert np.concatenate([b["m"] for b in batches]).tolist() == list(range(0, 2006, 2))


def test_vectors_dense_and_sparse() -> None:
    kind = pa.struct(
        [
            ("type", pa.int8()),
            ("size", pa.int32()),
            ("indices", pa.list_(pa.int32())),
            ("values", pa.list_(pa.float64())),
        ]
    )
    column = pa.array(
        [
            {"type": 1, "size": None, "indices": None, "values": [1.0, 2.0, 3.0]},
            {"type": 0, "size": 3, "indices": [0, 2], "values": [4.0, 5.0]},
            {"type": 0, "size": 3, "indices": [], "values": []},
        ],
        kind,
    )
    expected = [[1, 2, 3], [4, 0, 5], [0, 0, 0]]
    assert column_to_numpy(column, "x").tolist() == expected
    assert column_to_numpy(column.slice(1), "x").tolist() == expected[1:]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([1.0, None], "'x' has a null"),
        ([[1.0], [1.0, 2.0]], "from 1 to 2 values"),
        ([[1.0], [None]], "'x' has a null"),
        ([{"a": 1}], "struct"),
    ],
)
def test_bad_columns_are_named(values: list[object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        column_to_numpy(pa.array(values), "x")


# Prints bytes read, and the most private memory that the process had meanwhile.
READER = """
import sys
from horovod.spark.common.row_reader import AsyncRowBatches, ParquetRows
data = ParquetRows(sys.argv[1])
read, most = 0, 0
for number, batch in enumerate(AsyncRowBatches(8, False, data, 256, ["v"], shuffle=True)):
    read += batch["v"].nbytes
    if number % 10 == 0:
        with open("/proc/self/status") as status:
            most = max(most, *(int(l.split()[1]) for l in status if l.startswith("RssAnon")))
print(read, most << 10)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells private memory")
def test_memory_is_bounded_whatever_the_data_set_has(tmp_path: Path) -> None:
    rows, width = 1 << 15, 128
    numbers = np.random.default_rng(1).random(rows * width)
    lists = pa.FixedSizeListArray.from_arrays(pa.array(numbers), width).cast(pa.list_(pa.float64()))
    for number in range(16):
        # Row groups as Spark writes them: most of a file is one.
        path = tmp_path / f"{number}.parquet"
        pq.write_table(pa.table({"v": lists}), path, compression="none", row_group_size=rows)
    size = 16 * numbers.nbytes
    words = [sys.executable, "-c", READER, str(tmp_path)]
    done = subprocess.run(words, stdout=subprocess.PIPE, timeout=900, check=True)
    read, most = map(int, done.stdout.split())
    assert read == size
    assert most < size / 2


def test_missing_column_and_empty_share(folder: Path) -> None:
    data = ParquetRows(str(folder))
    with pytest.raises(ValueError, match="no column 'z'"):
        RowBatches(data, 1, ["z"])
    with pytest.raises(ValueError, match="use fewer ranks"):
        RowBatches(data, 1, ["n"], rank=0, size=1004, repeat=True)
    with pytest.raises(ValueError, match="no Parquet file"):
        ParquetRows(str(folder / "none"))
