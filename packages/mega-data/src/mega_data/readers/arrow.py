"""Parquet files and Hugging Face's datasets, saved or by name, as blocks of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from mega_data.readers.blocks import Block, Table
from mega_data.readers.hub import Named
from mega_schema.app.install_hint import install_hint
from mega_schema.errors import ConfigError, CorruptFileError

_ROWS = 1000  # read at a time, fewer where rows are long
_BATCH_BYTES = 1 << 22  # read at a time, or one row
_BUFFER_BYTES = 1 << 20  # of a column's file bytes


def batches(path: Path, start: int, keys: Sequence[str], size: int) -> Iterator[Block]:
    """The columns `keys` of the rows from number `start`, about `size` bytes a block.

    Raises:
        ConfigError: pyarrow is not installed, or there is no such column.
        CorruptFileError: the file is damaged.
    """
    taken, total = 0, path.stat().st_size
    with _reading(path, keys) as (count, reading):
        for end, part in _parts(reading, 0, start, size):
            now = total * end // max(1, count or end)
            yield Table(end, now - taken, _bytes(part))
            taken = now


def named_batches(named: Named, start: int, keys: Sequence[str], size: int) -> Iterator[Block]:
    """As `batches`, of a dataset by its name.

    Raises:
        MegaError: as `Named.batches`.
    """
    for end, part in _parts(named.batches(keys, start), start, start, size):
        yield Table(end, part.nbytes, _bytes(part))


def _parts(reading: Iterator[Any], at: int, start: int, size: int) -> Iterator[tuple[int, Any]]:
    """Rows from number `start` of batches that begin at number `at`, and the number after each part."""
    for batch in reading:
        first, at = at, at + batch.num_rows
        if at <= start:
            continue
        batch = batch.slice(max(0, start - first))
        step = max(1, batch.num_rows * size // max(1, batch.nbytes))
        for offset in range(0, batch.num_rows, step):
            part = batch.slice(offset, step)
            yield at - batch.num_rows + offset + part.num_rows, part


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """Each row with all its columns, as Python's values.

    Raises:
        ConfigError, CorruptFileError: as `batches`.
    """
    with _reading(path) as (_, reading):
        for _, part in _parts(reading, 0, 0, _BATCH_BYTES):
            yield from part.to_pylist()


@contextmanager
def _reading(path: Path, keys: Sequence[str] | None = None) -> Iterator[tuple[int, Iterator[Any]]]:
    """What `_open` gives; what is wrong with the file is told in one line."""
    try:
        pyarrow = import_module("pyarrow")
    except ImportError:
        hint = install_hint("mega-data", "parquet")
        raise ConfigError(
            path, "needs a library that is not installed", wanted="pyarrow", hint=hint
        ) from None
    try:
        yield _open(path, keys)
    except (pyarrow.ArrowInvalid, OSError) as error:
        if getattr(error, "errno", None) is not None:
            raise
        raise CorruptFileError(path, "damaged", found=str(error), hint="copy the file again") from None


def _open(path: Path, keys: Sequence[str] | None) -> tuple[int, Iterator[Any]]:
    """How many rows there are, 0 where that is not known, and the batches of the columns, None for all."""
    pyarrow = import_module("pyarrow")
    if path.suffix == ".parquet":
        file = import_module("pyarrow.parquet").ParquetFile(path, buffer_size=_BUFFER_BYTES)
        columns = _columns(path, file.schema_arrow.names, keys)
        return file.metadata.num_rows, _row_groups(file, columns)
    stream = pyarrow.ipc.open_stream(pyarrow.memory_map(str(path)))
    columns = _columns(path, stream.schema.names, keys)
    return 0, (batch.select(columns) for batch in stream)


def _row_groups(file: Any, columns: list[str]) -> Iterator[Any]:
    """The batches of a Parquet file, each of about _BATCH_BYTES by the sizes that its metadata state."""
    for number in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(number)
        chunks = [group.column(column) for column in range(group.num_columns)]
        size = sum(c.total_uncompressed_size for c in chunks if c.path_in_schema.split(".")[0] in columns)
        count = max(1, min(_ROWS, _BATCH_BYTES * group.num_rows // max(1, size)))
        yield from file.iter_batches(count, row_groups=[number], columns=columns)


def _columns(path: Path, names: Sequence[str], keys: Sequence[str] | None) -> list[str]:
    if lacking := [key for key in keys or () if key not in names]:
        raise ConfigError(path, f"no column {lacking[0]!r}", found=", ".join(names), hint="see --json-keys")
    return list(names if keys is None else keys)


def _bytes(batch: Any) -> bytes:
    pyarrow = import_module("pyarrow")
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return bytes(sink.getvalue())
