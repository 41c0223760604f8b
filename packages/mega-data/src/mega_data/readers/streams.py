"""Read a file as blocks, from any position at which a block ended."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from mega_data.readers.adapters import AdaptedBlock
from mega_data.readers.blocks import Block, JsonLines, PlainText
from mega_data.readers.compression import decompress, open_counted
from mega_data.readers.csv_table import read_csv_blocks
from mega_data.readers.inputs import HUB_FORMAT, InputFile
from mega_data.readers.versions import report_unreadable
from mega_schema.errors import FormatError
from mega_schema.remote_files import is_remote

BLOCK_BYTES = 1 << 20
TEXT_UNITS = ("file", "paragraph", "line")
MAX_TEXT_BYTES = 1 << 28  # of one document, and so of one block


def read_blocks(
    item: InputFile,
    start: int = 0,
    *,
    keys: Sequence[str] | None,
    size: int = BLOCK_BYTES,
    unit: str = "file",
) -> Iterator[Block]:
    """Yield the blocks of an input after position `start`, of about `size` bytes each.

    Args:
        start: 0, or the `end` of an earlier block of the same input: in bytes of text, or rows of a table.
        keys: columns to read from a table, None for all.
        unit: unit of a document of plain text, one of TEXT_UNITS.

    Raises:
        CorruptFileError: the file is damaged or not readable.
        FormatError: a line or text is longer than MAX_TEXT_BYTES.
        ConfigError: a library that the format needs is not installed.
    """
    with report_unreadable(item.path):
        blocks = _read_blocks(item, start, None if item.adapter else keys, size, unit)
        yield from adapt_blocks(item, blocks)


def adapt_blocks(item: InputFile, blocks: Iterator[Block]) -> Iterator[Block]:
    """Yield the blocks of an input as its adapter converts them."""
    adapter = item.adapter
    return blocks if adapter is None else (AdaptedBlock(block, adapter, item.path) for block in blocks)


def _read_blocks(
    item: InputFile, start: int, keys: Sequence[str] | None, size: int, unit: str
) -> Iterator[Block]:
    if item.format == "table":
        from mega_data.readers.arrow import read_table_blocks

        yield from read_table_blocks(item.path, start, keys, size)
    elif item.format == HUB_FORMAT:
        from mega_data.readers.arrow import read_hub_blocks

        yield from read_hub_blocks(item.hub_dataset, start, keys, size)
    elif item.format == "csv":
        with _open_input(item) as (file, consumed):
            yield from read_csv_blocks(file, consumed, start, size, item.path)
    elif item.format == "jsonl" and _is_read_by_workers(item):
        yield from _line_blocks(item.path, start, size)
    else:
        is_whole_file = item.format == "text" and unit == "file"
        paragraphs = item.format == "text" and unit == "paragraph"
        endings = (b"\n\n", b"\n\r\n") if paragraphs else (b"\n",)
        with _open_input(item) as (file, consumed):
            if start and is_remote(item.path) and not item.compression:
                file.seek(start)
            else:
                _skip_bytes(file, start)
            last_position = 0
            for end, data in _split_bytes(
                file, start, MAX_TEXT_BYTES if is_whole_file else size, endings, item.path, is_whole_file
            ):
                position = consumed()
                if item.format == "text":
                    yield PlainText(end, position - last_position, data, unit)
                else:
                    yield JsonLines(item.path, end - len(data), end, position - last_position, data)
                last_position = position


def _is_read_by_workers(item: InputFile) -> bool:
    """Return whether blocks are ranges of a plain local file, and not bytes from this process."""
    return not item.is_stream and not is_remote(item.path) and not item.compression


def _line_blocks(path: Path, start: int, size: int) -> Iterator[Block]:
    """Yield the ranges of blocks of whole lines: the workers read them, so no line goes through a pipe."""
    end = path.stat().st_size
    with path.open("rb") as file:
        while start < end:
            file.seek(min(start + size, end))
            line = file.readline(MAX_TEXT_BYTES)
            if len(line) >= MAX_TEXT_BYTES:
                raise line_too_long(path)
            block_end = file.tell()
            yield JsonLines(path, start, block_end, block_end - start)
            start = block_end


def _split_bytes(
    file: IO[bytes], position: int, size: int, endings: tuple[bytes, ...], path: Path, whole: bool
) -> Iterator[tuple[int, bytes]]:
    """Yield bytes of about `size` that stop after one of the endings, each with the position of its end."""
    buffer = b""
    for chunk in _read_chunks(file, size):
        buffer += chunk
        if whole:
            if len(buffer) >= MAX_TEXT_BYTES:
                raise line_too_long(path)
            continue
        if block_end := max(
            buffer.rfind(ending) + len(ending) if ending in buffer else 0 for ending in endings
        ):
            position += block_end
            yield position, buffer[:block_end]
            buffer = buffer[block_end:]
        elif len(buffer) >= MAX_TEXT_BYTES:
            raise line_too_long(path)
    if buffer:
        yield position + len(buffer), buffer


def _read_chunks(file: IO[bytes], size: int) -> Iterator[bytes]:
    """Yield chunks of `size` bytes; before an error the bytes that were read before it."""
    read = getattr(file, "read1", file.read)
    chunk = bytearray()
    try:
        while data := read(size - len(chunk)):
            chunk += data
            if len(chunk) == size:
                yield bytes(chunk)
                chunk.clear()
    except Exception:
        if chunk:
            yield bytes(chunk)
        raise
    if chunk:
        yield bytes(chunk)


def _skip_bytes(file: IO[bytes], size: int) -> None:
    while size > 0 and (skipped := len(file.read(min(size, BLOCK_BYTES)))):
        size -= skipped


@contextmanager
def _open_input(item: InputFile) -> Iterator[tuple[IO[bytes], Callable[[], int]]]:
    """Open the decompressed bytes of an input; also yield a function for the bytes read on disk."""
    if item.is_stdin:
        with decompress(sys.stdin.buffer, item.path) as file:
            yield file, lambda: 0
        return
    with open_counted(item.path) as file_and_position:
        yield file_and_position


def line_too_long(path: Path) -> FormatError:
    what = f"a line or text of more than {MAX_TEXT_BYTES >> 20} MiB"
    return FormatError(path, what, hint="split it; plain text also with --text-unit paragraph or line")
