"""Write JSON lines plain, compressed or as Parquet. The file name decides.

a.jsonl       lines
a.jsonl.gz    gzip members without name and time, so that equal lines give equal bytes
a.jsonl.zst   zstd frames with a checksum
a.parquet     a column per key, of the type that all its values have

A member or frame holds FRAME_BYTES of text, the last one less: a reader can divide the file at them.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, Final, cast

from mega_data.readers.blocks import parse_json
from mega_data.readers.compression import import_for_file
from mega_data.texts import exact_numbers
from mega_schema.atomic_io import atomic_write, full_disk_errors, own_partial_file
from mega_schema.errors import ConfigError

# format -> suffix of the name that plain JSON lines would have
OUTPUT_FORMATS: Final = MappingProxyType(
    {"jsonl": "", "jsonl.gz": ".gz", "jsonl.zst": ".zst", "parquet": ".parquet"}
)
_FILE_ENDINGS: Final = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
_GZIP_LEVEL: Final = 6
_ZSTD_LEVEL: Final = 3
FRAME_BYTES: Final = 1 << 24  # of text in a gzip member or a zstd frame
_GROUP_BYTES: Final = 1 << 24  # of the lines of a row group


def formatted_name(name: str, suffix: str) -> str:
    """Return the name of an output in another format.

    Args:
        name: name of the output as plain JSON lines.
        suffix: one of the values of OUTPUT_FORMATS.
    """
    return f"{name.removesuffix('.jsonl') if suffix == '.parquet' else name}{suffix}"


def file_ending(path: Path) -> str:
    """Return the ending by which a name is one of an output file, such as .jsonl.zst; "" for a folder."""
    return next((ending for ending in _FILE_ENDINGS if path.name.endswith(ending)), "")


def check_output_format(option: str, name: str) -> None:
    """Check that the library for a format is installed.

    Args:
        name: a name with the suffix of the format.

    Raises:
        ConfigError: it is not.
    """
    if name.endswith(".zst"):
        import_for_file(Path(option), "zstandard", "zst")
    elif name.endswith(".parquet"):
        import_for_file(Path(option), "pyarrow", "parquet")


@contextmanager
def open_output(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for bytes, in the format of its name; create its folder.

    The file is published when the block ends without an error.

    Raises:
        ConfigError: a Parquet file would have two types in one column.
        MegaError: the disk is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with full_disk_errors(path), atomic_write(path, own_partial_file(path)) as partial:
        if path.suffix == ".parquet":
            lines = own_partial_file(path)
            try:
                with lines.open("wb", buffering=1 << 20) as out:
                    yield out
                _write_parquet(lines, partial, path)
            finally:
                lines.unlink(missing_ok=True)
        else:
            with partial.open("wb", buffering=1 << 20) as file:
                if path.suffix not in (".gz", ".zst"):
                    yield file
                    return
                frames = _FrameWriter(file, path)
                try:
                    yield cast(IO[bytes], frames)
                finally:
                    frames.close()


class _FrameWriter:
    """Compress text in frames whose edges depend on the text alone, not on the sizes of the writes."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self._open_frame = _frame_opener(file, path)
        self._frame: Any = self._open_frame()
        self._size = 0  # bytes of text in the frame

    def write(self, data: bytes | memoryview) -> int:
        text = memoryview(data)
        start = 0
        while start < len(text):
            if self._size == FRAME_BYTES:
                self._frame.close()
                self._frame = self._open_frame()
                self._size = 0
            piece = text[start : start + FRAME_BYTES - self._size]
            self._frame.write(piece)
            self._size += len(piece)
            start += len(piece)
        return len(text)

    def close(self) -> None:
        self._frame.close()


def _frame_opener(file: IO[bytes], path: Path) -> Callable[[], Any]:
    """Return a function that opens the next member or frame of a file."""
    if path.suffix == ".gz":
        return lambda: gzip.GzipFile("", "wb", _GZIP_LEVEL, file, mtime=0)
    zstandard = import_for_file(path, "zstandard", "zst")
    compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_checksum=True)
    return lambda: compressor.stream_writer(file, closefd=False)


def _write_parquet(lines: Path, output: Path, path: Path) -> None:
    """Convert JSON lines to Parquet. The first pass over the lines finds the type of each column."""
    pyarrow = import_for_file(path, "pyarrow", "parquet")
    hint = "--output-format jsonl.zst"
    try:
        schema = pyarrow.schema([])
        for rows in _row_batches(lines):
            columns = [(key, pyarrow.array([row.get(key) for row in rows]).type) for key in _keys(rows)]
            schema = pyarrow.unify_schemas([schema, pyarrow.schema(columns)], promote_options="permissive")
        with import_module("pyarrow.parquet").ParquetWriter(output, schema, compression="zstd") as writer:
            for rows in _row_batches(lines):
                writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))
    except OverflowError as error:
        raise ConfigError(path, "has an integer beyond 64 bits", found=error, hint=hint) from None
    except pyarrow.ArrowException as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(path, "values of a key without a common type", found=reason, hint=hint) from None


def _keys(rows: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for row in rows for key in row))


def _row_batches(lines: Path) -> Iterator[list[dict[str, Any]]]:
    rows = list[dict[str, Any]]()
    size = 0
    with lines.open("rb") as file:
        for line in file:
            rows.append(exact_numbers(line, parse_json(line)))
            size += len(line)
            if size >= _GROUP_BYTES:
                yield rows
                rows = []
                size = 0
    if rows:
        yield rows
