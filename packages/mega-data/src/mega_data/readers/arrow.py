"""Read Parquet files and Hugging Face datasets, saved or by name, as blocks of rows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any

from mega_data.readers.blocks import Block, TableBlock
from mega_data.readers.hub import HubDataset
from mega_schema.app.install_hint import install_hint
from mega_schema.errors import ConfigError, CorruptFileError
from mega_schema.remote_files import is_remote

_ROWS = 1000  # read at a time, fewer if rows are long
_BATCH_BYTES = 1 << 22  # read at a time, or one row
_BUFFER_BYTES = 1 << 20  # of a column's file bytes


def read_table_blocks(
    path: Path, start: int, keys: Sequence[str] | None, size: int, end: int | None = None
) -> Iterator[Block]:
    """Yield the columns `keys` of the rows from number `start`, about `size` bytes a block.

    Args:
        keys: None is all columns.
        end: the first row of a row group of a Parquet file, at which to stop; None is the end of the file.

    Raises:
        ConfigError: pyarrow is not installed, or there is no such column.
        CorruptFileError: the file is damaged.
    """
    total = path.stat().st_size
    with _open_table(path, keys, start, end) as (count, row, batches):
        consumed = total * start // count if count else 0
        for block_end, part in _split_batches(batches, row, start, size):
            position = total * block_end // max(1, count or block_end)
            yield TableBlock(block_end, position - consumed, _to_ipc(part))
            consumed = position


def read_hub_blocks(
    dataset: HubDataset, start: int, keys: Sequence[str] | None, size: int
) -> Iterator[Block]:
    """Yield the blocks of a dataset by its name, as `read_table_blocks` does of a file.

    Raises:
        MegaError: as `HubDataset.batches`.
    """
    for end, part in _split_batches(dataset.batches(keys, start), start, start, size):
        yield TableBlock(end, part.nbytes, _to_ipc(part))


def _split_batches(batches: Iterator[Any], row: int, start: int, size: int) -> Iterator[tuple[int, Any]]:
    """Split batches that begin at number `row` into parts; yield the rows from `start` on and each end."""
    for batch in batches:
        first, row = row, row + batch.num_rows
        if row <= start:
            continue
        batch = batch.slice(max(0, start - first))
        step = max(1, batch.num_rows * size // max(1, batch.nbytes))
        for offset in range(0, batch.num_rows, step):
            part = batch.slice(offset, step)
            yield row - batch.num_rows + offset + part.num_rows, part


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield each row with all its columns, as Python values.

    Raises:
        ConfigError, CorruptFileError: as `read_table_blocks`.
    """
    with _open_table(path) as (_, _, batches):
        for _, part in _split_batches(batches, 0, 0, _BATCH_BYTES):
            yield from part.to_pylist()


def row_group_sizes(path: Path) -> list[tuple[int, int]]:
    """Return the rows and the bytes on disk of each row group of a Parquet file.

    Raises:
        ConfigError, CorruptFileError: as `read_table_blocks`.
    """
    with _table_errors(path), _open_parquet(path) as file:
        groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
        return [
            (group.num_rows, sum(group.column(n).total_compressed_size for n in range(group.num_columns)))
            for group in groups
        ]


@contextmanager
def _open_table(
    path: Path, keys: Sequence[str] | None = None, start: int = 0, end: int | None = None
) -> Iterator[tuple[int, int, Iterator[Any]]]:
    """Open a table, see `_open_batches`; report damage in one line."""
    with _table_errors(path):
        yield _open_batches(path, keys, start, end)


@contextmanager
def _table_errors(path: Path) -> Iterator[None]:
    try:
        pyarrow = import_module("pyarrow")
    except ImportError:
        hint = install_hint("mega-data", "parquet")
        raise ConfigError(
            path, "needs a library that is not installed", wanted="pyarrow", hint=hint
        ) from None
    try:
        yield
    except (pyarrow.ArrowInvalid, OSError) as error:
        if getattr(error, "errno", None) is not None:
            raise
        raise CorruptFileError(path, "damaged", found=str(error), hint="copy the file again") from None


def _open_parquet(path: Path) -> Any:
    source = path.open("rb") if is_remote(path) else path
    return import_module("pyarrow.parquet").ParquetFile(source, buffer_size=_BUFFER_BYTES)


def _open_batches(
    path: Path, keys: Sequence[str] | None, start: int, end: int | None
) -> tuple[int, int, Iterator[Any]]:
    """Return the number of rows, 0 if unknown, the number of the first row read, and the batches.

    Args:
        keys: columns to read, None for all.
        start, end: rows of a Parquet file to read, and those before in the same row group; None is its end.
    """
    pyarrow = import_module("pyarrow")
    if path.suffix == ".parquet":
        file = _open_parquet(path)
        if not file.metadata.num_rows:  # a file that we wrote without rows has no columns either
            return 0, 0, iter(())
        columns = _check_columns(path, file.schema_arrow, keys)
        groups = range(file.metadata.num_row_groups)
        ends = [*accumulate(file.metadata.row_group(number).num_rows for number in groups)]
        first = bisect_right(ends, start)
        last = len(ends) if end is None else bisect_right(ends, end)
        row = ends[first - 1] if first else 0
        return file.metadata.num_rows, row, _row_groups(file, columns, range(first, last))
    source = path.open("rb") if is_remote(path) else pyarrow.memory_map(str(path))
    stream = pyarrow.ipc.open_stream(source)
    columns = _top_columns(stream.schema.names, _check_columns(path, stream.schema, keys))
    return 0, 0, (batch.select(columns) for batch in stream)


def _row_groups(file: Any, columns: list[str], numbers: range) -> Iterator[Any]:
    """Yield the batches of row groups, about _BATCH_BYTES each by the sizes in the file's metadata."""
    for number in numbers:
        group = file.metadata.row_group(number)
        chunks = [group.column(column) for column in range(group.num_columns)]
        heads = {column.partition(".")[0] for column in columns}
        size = sum(c.total_uncompressed_size for c in chunks if c.path_in_schema.partition(".")[0] in heads)
        count = max(1, min(_ROWS, _BATCH_BYTES * group.num_rows // max(1, size)))
        yield from file.iter_batches(count, row_groups=[number], columns=columns)


def _check_columns(path: Path, schema: Any, keys: Sequence[str] | None) -> list[str]:
    """Return the columns to read, of a nested key the part of the column that holds it; None: all."""
    if keys is None:
        return list(schema.names)
    for key in keys:
        if not has_column(schema, key):
            found = ", ".join(schema.names)
            raise ConfigError(path, f"no column {key!r}", found=found, hint="see --json-key")
    return list(keys)


def has_column(schema: Any, key: str) -> bool:
    """Return whether a table has a column, or a nested one with this field."""
    if key in schema.names:
        return True
    head, *parts = key.split(".")
    if head not in schema.names or not parts:
        return False
    kind = schema.field(head).type
    for part in parts:
        if not import_module("pyarrow").types.is_struct(kind) or kind.get_field_index(part) < 0:
            return False
        kind = kind.field(part).type
    return True


def _top_columns(names: Sequence[str], keys: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(key if key in names else key.partition(".")[0] for key in keys))


def _to_ipc(batch: Any) -> bytes:
    pyarrow = import_module("pyarrow")
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return bytes(sink.getvalue())
