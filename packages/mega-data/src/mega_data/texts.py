"""Read and write JSON lines, and read the texts of inputs one after the other."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import orjson

from mega_data.readers.inputs import InputFile
from mega_data.readers.magic import BOM
from mega_data.readers.nested_keys import value_at
from mega_data.readers.streams import read_blocks

# 19 digits may exceed 64 bits. A search for equal bytes is several times as fast as one for a pattern
_LONG_NUMBER: Final = b"0" * 19
_EQUAL_DIGITS: Final = bytes.maketrans(b"123456789", b"0" * 9)


def read_texts(inputs: Iterable[InputFile], key: str, max_documents: int | None = None) -> Iterator[str]:
    """Yield the text under `key` of every row of the inputs, in any format; of a list each sentence.

    Args:
        max_documents: rows to read; None is all.

    Raises:
        FormatError: a row has no string there; the message begins with file and line.
    """
    documents = 0
    for item in inputs:
        first_row = 1
        version = item.version()
        for block in read_blocks(item, keys=[key]):
            rows = block.rows([key])
            item.check_version(version)
            for row_error in rows.errors:
                raise row_error.error(item.path, first_row)
            for (text,) in rows.texts:
                if documents == max_documents:
                    return
                documents += 1
                yield from [text] if isinstance(text, str) else text
            first_row += rows.count


def exact_numbers(line: bytes, values: dict[str, Any]) -> dict[str, Any]:
    """Restore integers beyond 64 bits in the values of a line, which `parse_json` reads as floats."""
    if _LONG_NUMBER not in line.translate(_EQUAL_DIGITS):
        return values
    try:
        exact: dict[str, Any] = json.loads(line.removeprefix(BOM))
    except (ValueError, RecursionError):  # more digits or levels than Python accepts
        return values
    return exact


def dump_line(values: Mapping[str, Any] | list[Any]) -> bytes:
    """Return the values as one line of JSON with its line break.

    Integers keep their digits; characters without UTF-8, such as bytes of a file name, become "?".
    """
    try:
        return orjson.dumps(values, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:  # a number beyond 64 bits, or half of a surrogate pair
        text = json.dumps(values, ensure_ascii=False, separators=(",", ":"))
        return text.encode("utf-8", "replace") + b"\n"


def text_of(values: Mapping[str, Any], key: str) -> str:
    """Return the text of a document; sentences in a list are joined by a space."""
    text = value_at(values, key)
    return text if isinstance(text, str) else " ".join(text)
