"""Split inputs into ranges, one for each task that reads, and read the blocks of a range."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType

from mega_data.readers.arrow import read_table_blocks, row_group_sizes
from mega_data.readers.blocks import Block, JsonLines
from mega_data.readers.compression import (
    DamagedRange,
    TextPiece,
    damage_error,
    lost_bytes,
    open_counted,
    read_pieces,
)
from mega_data.readers.frames import range_starts
from mega_data.readers.inputs import InputFile, format_of_name
from mega_data.readers.streams import MAX_TEXT_BYTES, adapt_blocks, line_too_long, read_blocks
from mega_data.readers.versions import check_unchanged, report_unreadable
from mega_schema.errors import CorruptFileError, FormatError
from mega_schema.remote_files import is_remote

_GROUPS_PER_RANGE = 64  # groups of small inputs in the size of a range
_COUNTED_BYTES = 1 << 20  # read at a time to count lines
_UNDIVIDED = MappingProxyType({".gz": "it has one member", ".zst": "it has one frame"})


@dataclass(frozen=True, slots=True)
class InputRange:
    """An input, or a range of one.

    Attributes:
        input: number of the input.
        start, end: of plain JSON lines the bytes in which the lines begin, of compressed ones the bytes in
            which the blocks, members or frames begin, of a Parquet file the rows; None is the end of the
            input.
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

    def place(self, number: int) -> str:
        """Describe the place of the row of this number, from 1, in the range."""
        if self.first_row is None:
            return f"{self.item.path}: line {number:,} after byte {self.start:,}"
        return f"{self.item.path}:{self.first_row + number}"


def whole_files(paths: Iterable[Path]) -> tuple[InputRange, ...]:
    """Return a range for each file that is all of it; the file need not exist yet."""
    items = (InputFile(path, format_of_name(path)) for path in paths)
    return tuple(
        InputRange(item, number, 0, None, item.size if item.path.exists() else 0)
        for number, item in enumerate(items)
    )


def cuts_by_input(ranges: Iterable[InputRange]) -> list[list[int]]:
    """Return the starts of the ranges of each input."""
    starts = dict[int, list[int]]()
    for part in ranges:
        starts.setdefault(part.input, []).append(part.start)
    return list(starts.values())


def group_small_inputs(ranges: Sequence[InputRange], size: int) -> tuple[tuple[InputRange, ...], ...]:
    """Group consecutive whole inputs of up to `size` bytes together; the other ranges are groups of one."""
    groups = list[tuple[InputRange, ...]]()
    group_bytes = 0
    for part in ranges:
        range_bytes = part.size if part.is_whole else size + 1
        group_bytes += range_bytes
        if not groups or group_bytes > size:
            groups.append((part,))
            group_bytes = range_bytes
        else:
            groups[-1] += (part,)
    return tuple(groups)


def plan_tasks(inputs: Sequence[InputFile], size: int) -> tuple[tuple[InputRange, ...], ...]:
    """Divide inputs into tasks: ranges of about `size` bytes, and small files together.

    Each task flushes its own files to the disk, which takes longer than the work on a small input.

    Raises:
        ConfigError: a library that an input needs is not installed.
    """
    return group_small_inputs(split_inputs(inputs, size), size // _GROUPS_PER_RANGE)


def split_inputs(inputs: Sequence[InputFile], size: int) -> tuple[InputRange, ...]:
    """Split JSON lines and Parquet files into ranges of about `size` bytes; other inputs stay whole.

    JSON lines are split if they are plain, .bz2, a local .gz of several members, or a local .zst of several
    frames. A file that is damaged or not readable stays whole: the task that reads it
    reports it.

    Raises:
        ConfigError: a library that an input needs is not installed.
    """
    ranges = list[InputRange]()
    for number, item in enumerate(inputs):
        item_bytes = item.size
        edges = [(0, 0)]
        if item_bytes > size:
            with suppress(CorruptFileError), report_unreadable(item.path):
                edges = _edges(item, item_bytes, size)
        starts, bytes_before = zip(*edges, strict=True)
        ends = (*starts[1:], None)
        sizes = (
            after - before
            for before, after in zip(bytes_before, (*bytes_before[1:], item_bytes), strict=True)
        )
        ranges += [InputRange(item, number, *values) for values in zip(starts, ends, sizes, strict=True)]
    return tuple(ranges)


def _edges(item: InputFile, item_bytes: int, size: int) -> list[tuple[int, int]]:
    """Return the start of each range, and the bytes before it."""
    if item.path.suffix == ".parquet":
        return _row_edges(item.path, size)
    if item.format != "jsonl":
        return [(0, 0)]
    compression = item.compression
    if compression in ("", ".bz2"):
        count = -(-item_bytes // size)
        return [(item_bytes * part // count,) * 2 for part in range(count)]
    if compression in (".gz", ".zst") and not is_remote(item.path):
        return [(start, start) for start in range_starts(item.path, compression, size)]
    return [(0, 0)]


def undivided_reason(part: InputRange, size: int) -> str:
    """Return why an input of more than `size` bytes is one range; "" if it is not."""
    if not part.is_whole or part.size <= size:
        return ""
    if part.item.path.suffix == ".parquet":
        return "it has one row group"
    if part.item.format == "jsonl" and not is_remote(part.item.path):
        return _UNDIVIDED.get(part.item.compression, f"{part.item.compression} is not divided")
    return "it is neither JSON lines nor Parquet" if part.item.format != "jsonl" else "it is remote"


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


def read_range(part: InputRange, keys: Sequence[str] | None, size: int, unit: str) -> Iterator[Block]:
    """Yield the blocks of a range, see `streams.read_blocks`.

    Args:
        keys: columns to read from a table, None for all.

    Raises:
        FormatError, ConfigError: as `streams.read_blocks`.
    """
    if part.is_whole:
        yield from read_blocks(part.item, keys=keys, size=size, unit=unit)
        return
    with report_unreadable(part.item.path):
        if part.item.format == "table":
            columns = None if part.item.adapter else keys
            blocks = read_table_blocks(part.item.path, part.start, columns, size, part.end)
        elif part.item.compression:
            blocks = _read_compressed_lines(part, size)
        else:
            blocks = _read_lines(part, size)
        yield from adapt_blocks(part.item, blocks)


def count_rows_before(part: InputRange) -> int | None:
    """Count the rows of the input before a range; None if it is remote and so would be read once more."""
    if part.first_row is not None:
        return part.first_row
    path = part.item.path
    if is_remote(path):
        return None
    if part.item.compression:  # and the line that is in, or before, the first text of the range
        return 1 + sum(piece.data.count(b"\n") for piece in _pieces_before(part))
    count = 0
    size = part.start
    with path.open("rb") as file:
        while size > 0 and (chunk := file.read(min(size, _COUNTED_BYTES))):
            count += chunk.count(b"\n")
            size -= len(chunk)
            last = chunk[-1:]
    return count + (last != b"\n")


def _pieces_before(part: InputRange) -> Iterator[TextPiece]:
    pieces = takewhile(lambda piece: piece.start < part.start, read_pieces(part.item.path))
    return (piece for piece in pieces if isinstance(piece, TextPiece))


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


def _read_compressed_lines(part: InputRange, size: int) -> Iterator[Block]:
    """Yield the lines of the blocks, members or frames that begin in a range of a compressed file.

    Only the text says whether a line ends where a range begins. So each range but the first skips its text up
    to the first line break; the range before it reads that much of the text after its end.
    """
    path = part.item.path
    end = part.item.size if part.end is None else part.end
    with nullcontext() if is_remote(path) else check_unchanged(path):
        skips_line = part.start > 0
        text = list[bytes]()  # not yet yielded
        text_bytes = position = 0  # `position` is of the next block in the text of the range
        consumed = part.start
        for piece in read_pieces(path, part.start):
            is_after_end = piece.start >= end
            if isinstance(piece, DamagedRange):
                before = b"".join(text)
                if line_end := before.rfind(b"\n") + 1:
                    block_bytes = min(piece.start, end) - consumed
                    yield JsonLines(path, position, position + line_end, block_bytes, before[:line_end])
                if is_after_end and part.item.compression != ".bz2":
                    return  # the next range begins there and reports it
                why = piece.why
                if not is_remote(path):
                    why = lost_bytes(path, why, piece.start, max(end, piece.end))
                raise damage_error(path, why)
            if piece.start < end < piece.end and part.item.compression != ".bz2":
                what = f"a member of gzip reaches over byte {end:,}, where another seemed to begin"
                raise FormatError(path, what, hint=f"--split-mb {part.item.size // 1_000_000 + 1}")
            data = piece.data
            if skips_line:
                if is_after_end:
                    return
                data = data[data.find(b"\n") + 1 :] if b"\n" in data else b""
                skips_line = b"\n" not in piece.data
            line_end = data.find(b"\n") + 1 if is_after_end else data.rfind(b"\n") + 1
            is_complete = bool(line_end) and (is_after_end or text_bytes + line_end >= size)
            if is_complete:
                block = b"".join([*text, data[:line_end]])
                block_end = position + len(block)
                yield JsonLines(path, position, block_end, min(piece.end, end) - consumed, block)
                if is_after_end:
                    return
                position = block_end
                consumed = min(piece.end, end)
                data = data[line_end:]
                text = []
                text_bytes = 0
            text.append(data)
            text_bytes += len(data)
            if text_bytes >= MAX_TEXT_BYTES:
                raise line_too_long(path)
        if text_bytes:
            yield JsonLines(path, position, position + text_bytes, end - consumed, b"".join(text))
