"""Parse JSON of a file; an error names the file, the line and the column. Imports no numpy, for `--help`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from mega_eval.compressed_file import decode_utf8
from mega_schema.errors import FormatError


def parse_json(content: str | bytes, path: Path, line: int | None = None) -> Any:
    """Parse a file of JSON, or a line of it.

    Args:
        line: number of the line; None: the content is the whole file.

    Raises:
        FormatError: it is not UTF-8, or not JSON.
    """
    text = content if isinstance(content, str) else decode_utf8(content, path, first_line=line or 1)
    if line is not None:
        text = text.rstrip("\r\n")
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        place = f"{path}:{error.lineno if line is None else line}"
        raise FormatError(place, "not JSON", found=f"{error.msg} at column {error.colno}") from None


def parse_object(content: str | bytes, path: Path, line: int | None = None) -> dict[str, object]:
    """Parse a JSON object; arguments and errors are those of `parse_json`.

    Raises:
        FormatError: it is not an object either.
    """
    value = parse_json(content, path, line)
    if not isinstance(value, dict):
        place = path if line is None else f"{path}:{line}"
        raise FormatError(place, "not a JSON object", found=type(value).__name__, wanted='{"key": "..."}')
    return value
