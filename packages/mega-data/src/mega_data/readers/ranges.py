"""Split inputs into ranges, one for each task that encodes, and read the blocks of a range."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mega_data.readers.arrow import read_table_blocks, row_group_sizes
from mega_data.readers.blocks import Block, JsonLines
from mega_data.readers.compression import open_counted
from mega_data.readers.inputs import InputFile
from mega_data.readers.streams import MAX_TEXT_BYTES, line_too_long, read_blocks


@dataclass(frozen=True, slots=True)
class InputRange:
    """An input, or a range of one.

    Attributes:
        input: number of the input.
        start, end: of plain JSON lines the bytes in which the lines begin, of a Parquet file the rows; None
            is the end of the input.
        size: bytes on disk.
    """

    item: InputFile
    input: int
    start: int
    end: int | None
    size: int

    @property
    def is_whole(self) -> bool:
        return self.start == 0 and self.end is None

    @property
    def first_row(self) -> int | None:
        """Return the number of rows before the range, None if it is unknown."""
        return self.start if self.item.format == "table" or not self.start else None


def split_inputs(inputs: Sequence[InputFile], size: int) -> tuple[InputRange, ...]:
    """Split plain JSON lines and Parquet files into ranges of about `size` bytes; other inputs stay whole.

    Raises:
        CorruptFileError: a Parquet file is damaged.
        ConfigError: a library that an input needs is not installed.
    """
    ranges = list[InputRange]()
    for number, item in enumerate(inputs):
        edges = [(0, 0)]  # start of each range, and the bytes before it
        item_bytes = item.size
        if item_bytes > size and item.format == "jsonl" and not item.compression:
            count = -(-item_bytes // size)
            edges = [(item_bytes * part // count,) * 2 for part in range(count)]
        elif item_bytes > size and item.path.suffix == ".parquet":
            edges = _row_edges(item.path, size)
        starts, bytes_before = zip(*edges, strict=True)
        ends = (*starts[1:], None)
        sizes = (
            after - before
            for before, after in zip(bytes_before, (*bytes_before[1:], item_bytes), strict=True)
        )
        ranges += [InputRange(item, number, *values) for values in zip(starts, ends, sizes, strict=True)]
    return tuple(ranges)


def _row_edges(path: Path, size: int) -> list[tuple[int, int]]:
    """Return the first row of each range of whole row groups, and the bytes before it."""
    edges = [(0, 0)]
    row = position = 0
    for rows, group_bytes in row_group_sizes(path):
        if position - edges[-1][1] >= size:
            edges.append((row, position))
        row += rows
        position += group_bytes
    return edges


def read_range(part: InputRange, keys: Sequence[str], size: int, unit: str) -> Iterator[Block]:
    """Yield the blocks of a range, see `streams.read_blocks`.

    Raises:
        FormatError, ConfigError: as `streams.read_blocks`.
    """
    if part.is_whole:
        yield from read_blocks(part.item, keys=keys, size=size, unit=unit)
    elif part.item.format == "table":
        yield from read_table_blocks(part.item.path, part.start, keys, size, part.end)
    else:
        yield from _read_lines(part, size)


def _read_lines(part: InputRange, size: int) -> Iterator[Block]:
    """Yield the lines that begin in a range of bytes."""
    path = part.item.path
    with open_counted(path) as (file, _):
        position = part.start
        if position:  # the line that this byte is part of may begin before it
            file.seek(position - 1)
            position += len(file.readline(MAX_TEXT_BYTES)) - 1
        end = part.item.size if part.end is None else part.end
        while position < end:
            data = file.read(min(size, end - 1 - position))
            line = file.readline(MAX_TEXT_BYTES)  # from the last byte of the range on
            if len(line) >= MAX_TEXT_BYTES:
                raise line_too_long(path)
            data += line
            if not data:  # the file was truncated: `open_counted` reports it
                break
            yield JsonLines(path, position, position + len(data), len(data), data)
            position += len(data)
