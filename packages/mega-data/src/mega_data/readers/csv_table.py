"""Read CSV and TSV files with a header as blocks of whole rows.

The first row names the columns. A field may be quoted, with `""` for a quote in it (RFC 4180); then it may
contain delimiters and line breaks. Columns of a .tsv file are divided by tabs.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any, Final

import orjson

from mega_data.readers.blocks import Block, Objects, RowError, Rows
from mega_data.readers.compression import open_decompressed, strip_extension
from mega_data.readers.magic import BOM
from mega_schema.errors import FormatError

MAX_ROW_BYTES: Final = 1 << 28
_BLOCK_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class CsvBlock:
    """Whole rows of a CSV file.

    Attributes:
        header: names of the columns.
        header_lines: lines of the header in front of the block; 0 if the block is not the first.
        path: the file, for messages.
    """

    end: int
    consumed_bytes: int
    data: bytes
    header: tuple[str, ...]
    header_lines: int
    delimiter: str
    path: Path

    def rows(self, keys: Sequence[str]) -> Rows:
        self.check_columns(dict.fromkeys(keys, "--json-key"))
        columns = [self.header.index(key) for key in keys]
        rows = Rows(0, len(self.data))
        for number, fields in self.read():
            if isinstance(fields, RowError):
                rows.errors.append(fields)
            else:
                rows.numbers.append(number)
                rows.texts.append(tuple(fields[column] for column in columns))
        rows.count = self.count_lines()
        return rows

    def objects(self) -> Objects:
        items: list[tuple[int, dict[str, Any] | RowError]] = []
        for number, fields in self.read():
            if isinstance(fields, RowError):
                items.append((number, fields))
            else:
                items.append((number, dict(zip(self.header, fields, strict=True))))
        return Objects(self.count_lines(), len(self.data), items)

    def count_lines(self) -> int:
        """Return the number of lines, including those of a header in front of the block."""
        return self.header_lines + self.data.count(b"\n") + (not self.data.endswith(b"\n"))

    def read(self) -> Iterator[tuple[int, list[str] | RowError]]:
        """Yield the number of each row's first line in the block, from 0, and its fields; no blank rows."""
        csv.field_size_limit(MAX_ROW_BYTES)  # of the library, 128 KiB by default
        lines = list(io.StringIO(self.data.decode("utf-8", "surrogateescape"), newline=""))
        is_utf8 = self.data.isascii() or not any(map(_has_wrong_byte, lines))
        reader = csv.reader(lines, delimiter=self.delimiter, strict=True)
        start = 0
        while True:
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                fields = [str(error)]
                what = "not CSV"
            else:
                what = "" if len(fields) in (0, len(self.header)) else "a row of another number of fields"
            number = self.header_lines + start
            raw = lines[start : reader.line_num]
            start = reader.line_num
            if not is_utf8 and any(map(_has_wrong_byte, raw)):
                what = "not UTF-8"
            if what:
                yield number, self._error(number, what, fields, "".join(raw))
            elif fields:
                yield number, fields

    def _error(self, number: int, what: str, fields: list[str], raw: str) -> RowError:
        raw = raw.encode("utf-8", "surrogateescape").decode("utf-8", "replace").rstrip("\r\n")
        if what == "not UTF-8":
            return RowError(number, what, "other bytes", "text in UTF-8", raw)
        if what == "not CSV":
            return RowError(number, what, fields[0], 'quotes in quoted fields as ""', raw)
        return RowError(number, what, f"{len(fields)}", f"{len(self.header)}, as the header", raw)

    def check_columns(self, options: Mapping[str, str]) -> None:
        """Check that the header names each of the columns.

        Args:
            options: the command-line option that names each column, for the hint.

        Raises:
            FormatError: a column is missing.
        """
        for name, option in options.items():
            if name in self.header:
                continue
            hint = f"name a column with {option}"
            if len(self.header) == 1:  # of a file with semicolons, for example
                separators = "tabs" if self.delimiter == "\t" else "commas, or by tabs in a .tsv file"
                hint = f"{hint}, or separate the columns by {separators}"
            found = ", ".join(self.header) or "no columns"
            raise FormatError(self.path, f"no column {name!r}", found=found, hint=hint)


def read_csv_blocks(
    file: IO[bytes], consumed: Callable[[], int], start: int, size: int, path: Path
) -> Iterator[Block]:
    """Yield the blocks of an open file after byte `start`, of about `size` bytes each.

    Args:
        consumed: returns the bytes read on disk.
        start: 0, or the `end` of an earlier block.

    Raises:
        FormatError: the header is wrong, or a row is longer than MAX_ROW_BYTES.
    """
    delimiter = "\t" if strip_extension(path).endswith(".tsv") else ","
    buffer = b""
    while not (position := _row_end(buffer, delimiter)) and (chunk := file.read(max(size, len(buffer)))):
        buffer = _append(buffer, chunk, path)
    position = position or len(buffer)
    header = _parse_header(buffer[:position], delimiter, path)
    header_lines = buffer.count(b"\n", 0, position) if start <= position else 0
    buffer = buffer[position:]
    while position < start and (buffer := buffer or file.read(size)):
        skipped = min(len(buffer), start - position)
        buffer = buffer[skipped:]
        position += skipped
    last_consumed = 0
    is_whole = False
    while not is_whole:
        chunk = file.read(max(size, len(buffer)))  # doubles within a long row
        is_whole = not chunk
        buffer = _append(buffer, chunk, path)
        row_end = len(buffer) if is_whole else _rows_end(buffer, delimiter)
        if row_end:
            position += row_end
            amount = consumed() - last_consumed
            last_consumed += amount
            yield CsvBlock(position, amount, buffer[:row_end], header, header_lines, delimiter, path)
            header_lines = 0
            buffer = buffer[row_end:]


def read_csv_lines(path: Path, columns: Mapping[str, str]) -> Iterator[tuple[int, bytes]]:
    """Yield the number of each row's first line in the file, from 1, and the row as a line of JSON.

    A row is an object. A wrong row is a list: what is wrong, what was found and wanted, and its text.

    Args:
        columns: columns that the file must have, see `CsvBlock.check_columns`.

    Raises:
        FormatError: a column is missing, or as `read_csv_blocks`.
    """
    first_line = 1
    with open_decompressed(path) as file:
        for block in read_csv_blocks(file, lambda: 0, 0, _BLOCK_BYTES, path):
            assert isinstance(block, CsvBlock)
            block.check_columns(columns)
            for number, fields in block.read():
                if isinstance(fields, RowError):
                    row: object = [fields.what, fields.found, fields.wanted, fields.raw]
                else:
                    row = dict(zip(block.header, fields, strict=True))
                yield first_line + number, orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)
            first_line += block.count_lines()


def _append(buffer: bytes, chunk: bytes, path: Path) -> bytes:
    if len(buffer) + len(chunk) > MAX_ROW_BYTES:
        what = f"a row of more than {MAX_ROW_BYTES >> 20} MiB"
        raise FormatError(path, what, hint="is a quote never closed?")
    return buffer + chunk


def _parse_header(data: bytes, delimiter: str, path: Path) -> tuple[str, ...]:
    try:
        text = data.removeprefix(BOM).decode("utf-8")
        names = next(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True), [])
    except (UnicodeDecodeError, csv.Error) as error:
        raise FormatError(f"{path}:1", "not a header of CSV in UTF-8", found=error) from None
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise FormatError(f"{path}:1", "two columns of one name", found=repeated)
    return tuple(names)


def _has_wrong_byte(text: str) -> bool:
    return not text.isascii() and _WRONG_BYTE.search(text) is not None


_WRONG_BYTE: Final = re.compile("[\udc80-\udcff]")


def _row_end(data: bytes, delimiter: str) -> int:
    """Return the end of the first row; 0 if the row is not whole."""
    match = _patterns(delimiter)[0].match(data)
    return match.end() if match else 0


def _rows_end(data: bytes, delimiter: str) -> int:
    """Return the end of the last whole row."""
    if b'"' not in data:
        return data.rfind(b"\n") + 1
    match = _patterns(delimiter)[1].match(data)
    return match.end() if match else 0


@cache
def _patterns(delimiter: str) -> tuple[re.Pattern[bytes], re.Pattern[bytes]]:
    """Return the patterns of one row and of all whole rows. Possessive: neither ever backtracks."""
    comma = re.escape(delimiter.encode())
    quoted = rb'"[^"]*+(?:""[^"]*+)*+"[^%b\n]*+' % comma
    field = rb'(?:%b|[^"%b\n][^%b\n]*+)?+' % (quoted, comma, comma)
    row = rb"%b(?:%b%b)*+\n" % (field, comma, field)
    return re.compile(row), re.compile(rb"(?:%b)*+" % row)
