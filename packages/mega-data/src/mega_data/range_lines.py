"""Read a range of an input, or rows that an adapter converts, as lines of JSON."""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from typing import Any

import orjson

from mega_data.readers.blocks import JsonLines, RowError
from mega_data.readers.ranges import InputRange, count_rows_before, read_range
from mega_data.readers.streams import BLOCK_BYTES
from mega_data.texts import dump_line
from mega_schema.errors import FormatError

_HINT = "correct the function, or the row that it does not accept"


def read_range_lines(part: InputRange) -> Iterator[tuple[int, bytes]]:
    """Yield the number of each line in the range, from 1, and the line.

    A row of a table is an object. With an adapter, a document is an object, and a wrong row is a list: what
    is wrong, what was found and wanted, and its text. A row that the adapter leaves out is a blank line.

    Raises:
        CorruptFileError: the file is damaged.
        FormatError: an adapter returned another type than a document.
    """
    if part.item.adapter is not None:
        yield from _read_adapted_lines(part)
        return
    number = 0
    for block in read_range(part, None, BLOCK_BYTES, "file"):
        if isinstance(block, JsonLines):
            assert block.data is not None  # of a range
            lines = iter(BytesIO(block.data))
        else:
            lines = (dump_row(values) for _, values in block.objects().items)
        for line in lines:
            number += 1
            yield number, line


def dump_row(values: Any) -> bytes:
    """Return a row of a table as a line of JSON."""
    return orjson.dumps(values, default=_json_default, option=orjson.OPT_APPEND_NEWLINE)


def _json_default(value: Any) -> str:
    """Convert a value of a table that JSON cannot hold: bytes as text, any other as Python prints it."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _read_adapted_lines(part: InputRange) -> Iterator[tuple[int, bytes]]:
    rows_before = 0  # of the block, in the range
    for block in read_range(part, None, BLOCK_BYTES, "file"):
        objects = block.objects()
        next_row = 0
        for row, document in objects.items:
            yield from ((rows_before + blank + 1, b"\n") for blank in range(next_row, row))
            next_row = row + 1
            yield rows_before + row + 1, _dump_document(part, document, rows_before)
        yield from ((rows_before + blank + 1, b"\n") for blank in range(next_row, objects.count))
        rows_before += objects.count


def _dump_document(part: InputRange, document: dict[str, Any] | RowError, rows_before: int) -> bytes:
    """Return what an adapter made of a row, as a line.

    Args:
        rows_before: rows of the range before the block of the row.

    Raises:
        FormatError: the adapter returned another type than a document, or a value that is not JSON.
    """
    if not isinstance(document, RowError):
        try:
            return dump_line(document)
        except (TypeError, ValueError) as error:
            assert part.item.adapter is not None
            what = f"the adapter {part.item.adapter.function} returned a value that is not JSON"
            raise FormatError(part.item.path, what, found=error, hint=_HINT) from error
    if document.is_fatal:
        before = count_rows_before(part) or 0
        raise document.error(part.item.path, before + rows_before + 1, _HINT)
    return dump_line([document.what, document.found, document.wanted, document.raw])
