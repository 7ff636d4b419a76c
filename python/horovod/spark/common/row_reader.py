"""Batches of rows of a Parquet data set: each rank its share of the rows, in bounded memory, without any framework."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from horovod.data import AsyncDataLoaderMixin, BaseDataLoader

Columns = dict[str, Any]  # name -> array, the first axis is the rows
Row = dict[str, Any]

# Rows that are mixed with each other when shuffling, beside the order of row groups.
_POOL_BYTES = 16 << 20
_READ_ROWS = 4096
_READ_BYTES = 4 << 20
_BUFFER_BYTES = 1 << 20
# Row groups that a shuffling reader takes from in turns.
_OPEN_SLICES = 4


@dataclass(frozen=True)
class RowGroup:
    """One row group, as its file's footer describes it."""

    path: str
    index: int
    rows: int
    bytes: int


@dataclass(frozen=True)
class RowSlice:
    """Rows `start` to `stop` of a row group."""

    group: RowGroup
    start: int
    stop: int


def shard_slices(groups: Sequence[RowGroup], rank: int, size: int) -> list[RowSlice]:
    """The rows of one of `size` shares, which differ by at most one row; together they are all rows, each once."""
    if not 0 <= rank < size:
        raise ValueError(f"expected a rank from 0 to {size - 1}, got {rank}")
    total = sum(group.rows for group in groups)
    first, last = total * rank // size, total * (rank + 1) // size
    slices = []
    offset = 0
    for group in groups:
        start, stop = max(first - offset, 0), min(last - offset, group.rows)
        if start < stop:
            slices.append(RowSlice(group, start, stop))
        offset += group.rows
    return slices


class ParquetRows:
    """A folder of Parquet files: its schema and row groups, read from the files' footers.

    Parameters
    ----------
    path
        The folder, or one file, as the file system names it.
    filesystem
        An fsspec file system; None for local files.
    """

    def __init__(self, path: str, filesystem: Any = None) -> None:
        self.path = path
        self._filesystem = filesystem
        self.schema: Any = None
        self.null_columns: set[str] = set()
        groups = []
        for name in self._file_names():
            with self._open(name) as file:
                metadata = file.metadata
                if self.schema is None:
                    self.schema = file.schema_arrow
                elif not self.schema.equals(file.schema_arrow):
                    raise ValueError(
                        f"{name} has another schema than the other files in {path}; write them anew"
                    )
                for index in range(metadata.num_row_groups):
                    group = metadata.row_group(index)
                    groups.append(RowGroup(name, index, group.num_rows, group.total_byte_size))
                    self._note_nulls(group)
        if self.schema is None:
            raise ValueError(f"No data found in {path}: there is no Parquet file")
        self.groups: tuple[RowGroup, ...] = tuple(groups)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return sum(group.rows for group in self.groups)

    @property
    def bytes(self) -> int:
        """Size of the decoded columns, as the footers say."""
        return sum(group.bytes for group in self.groups)

    def _file_names(self) -> list[str]:
        fs = self._filesystem
        if fs is None:
            import fsspec

            fs = self._filesystem = fsspec.filesystem("file")
        if fs.isfile(self.path):
            return [self.path]
        names = []
        for name in fs.find(self.path):
            base = name.rsplit("/", 1)[-1]
            if not base.startswith(("_", ".")) and base.endswith((".parquet", ".parq")):
                names.append(name)
        return sorted(names)

    def _open(self, name: str) -> Any:
        protocol = self._filesystem.protocol
        is_local = protocol == "file" or "file" in protocol
        source = name if is_local else self._filesystem.open(name, "rb")
        # Page by page: else a row group, of 128 MB as Spark writes them, would be in memory as a whole.
        return pq.ParquetFile(source, buffer_size=_BUFFER_BYTES, pre_buffer=False)

    def _note_nulls(self, group: Any) -> None:
        for number in range(group.num_columns):
            column = group.column(number)
            name = column.path_in_schema.split(".")[0]
            # A vector's struct has empty parts by design.
            if pa.types.is_struct(self.schema.field(name).type):
                continue
            statistics = column.statistics
            if statistics is not None and statistics.has_null_count and statistics.null_count:
                self.null_columns.add(name)

    def require(self, columns: Sequence[str]) -> None:
        """Raise ValueError unless all columns exist."""
        missing = [name for name in columns if name not in self.schema.names]
        if missing:
            raise ValueError(
                f"{self.path} has no column {', '.join(map(repr, missing))}; it has {', '.join(self.schema.names)}"
            )

    def first_rows(self, columns: Sequence[str]) -> Iterator[Columns]:
        """The first row, as a batch."""
        group = next(group for group in self.groups if group.rows)
        return self.read(RowSlice(group, 0, 1), columns)

    def read(self, piece: RowSlice, columns: Sequence[str]) -> Iterator[Columns]:
        """The rows of a slice, some thousand at a time."""
        group = piece.group
        row_bytes = max(1, group.bytes // max(1, group.rows))
        step = max(1, min(_READ_ROWS, _READ_BYTES // row_bytes))
        position = 0
        with self._open(group.path) as file:
            for batch in file.iter_batches(step, [group.index], list(columns), use_threads=False):
                start, stop = piece.start - position, piece.stop - position
                position += batch.num_rows
                if stop <= 0:
                    return
                if start < batch.num_rows:
                    part = batch.slice(max(start, 0), min(stop, batch.num_rows) - max(start, 0))
                    yield {
                        name: column_to_numpy(part.column(part.schema.get_field_index(name)), name)
                        for name in columns
                    }


def column_to_numpy(column: Any, name: str) -> Any:
    """An Arrow array as numpy's: lists of one length, and vectors of Spark's, get a second axis."""
    kind = column.type
    if column.null_count:
        raise ValueError(
            f"column {name!r} has a null value; remove such rows or fill them (DataFrame.fillna)"
        )
    if pa.types.is_struct(kind):
        return _vectors_to_numpy(column, name)
    if pa.types.is_fixed_size_list(kind):
        inner = column_to_numpy(column.flatten(), name)
        return inner.reshape(len(column), kind.list_size, *inner.shape[1:])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        offsets = column.offsets.to_numpy()
        lengths = np.diff(offsets)
        if len(lengths) and (lengths != lengths[0]).any():
            raise ValueError(_ragged(name, int(lengths.min()), int(lengths.max())))
        inner = column_to_numpy(column.flatten(), name)
        width = int(lengths[0]) if len(lengths) else 0
        return inner.reshape(len(column), width, *inner.shape[1:])
    return column.to_numpy(zero_copy_only=False)


def _ragged(name: str, low: int, high: int) -> str:
    return (
        f"column {name!r} does not have uniform shape: its rows have from {low} to {high} values; "
        "pad or cut them to one length"
    )


def _vectors_to_numpy(column: Any, name: str) -> Any:
    """Spark's vectors (type 1: dense, 0: sparse) as one dense array."""
    names = {field.name for field in column.type}
    if names != {"type", "size", "indices", "values"}:
        raise ValueError(
            f"column {name!r} is a struct of {sorted(names)}; expected numbers, lists of numbers or vectors"
        )
    fields = {field: column.field(field) for field in names}
    values, sizes = fields["values"], fields["size"]
    counts = np.diff(values.offsets.to_numpy())
    dense = fields["type"].to_numpy(zero_copy_only=False) == 1
    widths = np.where(
        dense, counts, sizes.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    )
    if len(widths) and (widths != widths[0]).any():
        raise ValueError(_ragged(name, int(widths.min()), int(widths.max())))
    width = int(widths[0]) if len(widths) else 0
    result = np.zeros((len(column), width))
    rows = np.repeat(np.arange(len(column)), counts)
    numbers = values.flatten().to_numpy(zero_copy_only=False)
    in_dense = dense[rows]
    result[dense] = numbers[in_dense].reshape(-1, width)
    indices = fields["indices"].flatten().to_numpy(zero_copy_only=False)
    result[rows[~in_dense], indices.astype(np.int64)] = numbers[~in_dense]
    return result


class RowBatches(BaseDataLoader):
    """Batches of one rank's share of the rows.

    Parameters
    ----------
    data
        The data set.
    batch_size
        Rows in a batch; only the last one of a reader that does not repeat may have fewer.
    columns
        Which columns to read.
    rank, size
        Which share of how many.
    shuffle, seed
        Whether to mix the rows, each epoch in another way; the same seed gives the same orders.
    repeat
        Whether to begin again for ever; batches then span the end of an epoch.
    transform
        Called with each row, a dict of columns; what it returns takes the row's place.
    cache
        Whether to keep the whole share in memory once it is read.
    """

    def __init__(
        self,
        data: ParquetRows,
        batch_size: int,
        columns: Sequence[str],
        *,
        rank: int = 0,
        size: int = 1,
        shuffle: bool = False,
        seed: int = 0,
        repeat: bool = False,
        transform: Callable[[Row], Row] | None = None,
        cache: bool = False,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size: expected 1 or more rows, got {batch_size}")
        data.require(columns)
        self._data = data
        self._batch_size = batch_size
        self._columns = list(columns)
        self._slices = shard_slices(data.groups, rank, size)
        self.rows = sum(piece.stop - piece.start for piece in self._slices)
        self._shuffle = shuffle
        self._seed = (seed, rank)
        self._repeat = repeat
        self._transform = transform
        self._cache = cache
        self._cached: list[Columns] | None = None
        if repeat and not self.rows:
            raise ValueError(
                f"rank {rank} of {size} has no row: {data.path} has only {data.rows} rows; use fewer ranks"
            )

    def __len__(self) -> int:
        """Number of batches of one epoch."""
        return -(-self.rows // self._batch_size)

    def sample(self) -> Columns:
        """A batch of one row, as the others will be."""
        return self._transformed(next(self._data.first_rows(self._columns)))

    def _iterate(self) -> Iterator[Columns]:
        rest: list[Columns] = []
        epoch = 0
        while True:
            rng = np.random.default_rng((*self._seed, epoch))
            pool, pool_bytes = rest, 0
            for part in self._parts(rng):
                pool.append(part)
                pool_bytes += sum(values.nbytes for values in part.values())
                if pool_bytes >= _POOL_BYTES and not self._cache:
                    pool = yield from self._batches(pool, rng)
                    pool_bytes = 0
            rest = yield from self._batches(pool, rng)
            if not self._repeat:
                yield from rest
                return
            epoch += 1

    def _parts(self, rng: Any) -> Iterator[Columns]:
        if self._cached is not None:
            yield from self._cached
            return
        kept = []
        for part in self._read(rng):
            ready = self._transformed(part)
            if self._cache:
                kept.append(ready)
            yield ready
        if self._cache:
            self._cached = kept

    def _read(self, rng: Any) -> Iterator[Columns]:
        order = rng.permutation(len(self._slices)) if self._shuffle else range(len(self._slices))
        waiting = [self._slices[number] for number in order]
        abreast = _OPEN_SLICES if self._shuffle else 1
        readers: list[Iterator[Columns]] = []
        while waiting or readers:
            while waiting and len(readers) < abreast:
                readers.append(self._data.read(waiting.pop(0), self._columns))
            for reader in list(readers):
                part = next(reader, None)
                if part is None:
                    readers.remove(reader)
                else:
                    yield part

    def _transformed(self, part: Columns) -> Columns:
        if self._transform is None:
            return part
        count = len(next(iter(part.values())))
        rows = [
            self._transform({name: values[number] for name, values in part.items()})
            for number in range(count)
        ]
        return {name: np.stack([np.asarray(row[name]) for row in rows]) for name in rows[0]}

    def _batches(self, pool: list[Columns], rng: Any) -> Generator[Columns, None, list[Columns]]:
        """All full batches of the pool; returns what is left of it."""
        if not pool:
            return pool
        joined = {name: np.concatenate([part[name] for part in pool]) for name in pool[0]}
        pool.clear()
        count = len(next(iter(joined.values())))
        order = rng.permutation(count) if self._shuffle else None
        full = count - count % self._batch_size
        for start in range(0, full, self._batch_size):
            yield _rows_of(joined, order, start, start + self._batch_size)
        return [_rows_of(joined, order, full, count)] if full < count else []


def _rows_of(columns: Columns, order: Any, start: int, stop: int) -> Columns:
    # Always a copy: a view would keep the whole pool alive, and may be read-only memory of Arrow's.
    which = order[start:stop] if order is not None else slice(start, stop)
    return {name: np.array(values[which]) for name, values in columns.items()}


class AsyncRowBatches(AsyncDataLoaderMixin, RowBatches):
    """`RowBatches` read ahead by a thread; the first argument is how many batches."""
