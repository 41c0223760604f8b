"""Blocks of an input, small values to send to a worker process, and the rows of texts in them."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, Protocol

import orjson

from mega_data.readers.magic import BOM
from mega_data.readers.nested_keys import value_at, value_getter
from mega_schema.errors import FormatError

PARAGRAPH_END = re.compile(rb"(\n\r?\n)")  # a group, so that `split` returns it too
DAMAGED_POSITION = 1 << 62  # of an input whose rest cannot be read
QUARANTINE_KEYS: Final = ("file", "line", "reason", "row")  # of `RowError.to_json`
TextOrSentences = str | list[str]  # a list has sentences


@dataclass(frozen=True, slots=True)
class RowError:
    """The error of a row, as a value that can be sent between processes.

    Attributes:
        row: number of the row in its block, from 0.
        found: the value found; "" if unknown.
        wanted: as `found`.
        raw: the row itself.
        is_fatal: the file could not be read: there is no row to skip, and the run ends.
        ends_file: the file is damaged, and its rest is skipped.
    """

    row: int
    what: str
    found: str
    wanted: str
    raw: str = ""
    is_fatal: bool = False
    ends_file: bool = False

    def error(self, path: Path, first: int, hint: str = "correct or delete the line") -> FormatError:
        """Convert to an exception; `first` is the number in the file of the block's first row."""
        where = f"{path}:{first + self.row}"
        return FormatError(where, self.what, **self.values(), hint=hint)

    def to_json(self, path: Path, first: int) -> dict[str, object]:
        """Convert to the values of a line of a quarantine file."""
        return quarantine_row(path, first + self.row, self.what, self.values(), self.raw)

    def damage_notice(self, path: Path) -> str:
        return f"{path}: {self.what}: found {self.found}"

    def values(self) -> dict[str, str]:
        """Return the values found and wanted, if known."""
        values = {"found": self.found, "wanted": self.wanted}
        return {word: value for word, value in values.items() if value}


def quarantine_row(
    path: Path, number: int, what: str, values: Mapping[str, object], row: str
) -> dict[str, object]:
    """Build the values of a line of a quarantine file.

    Args:
        number: number of the row in the file, from 1.
        values: the values found and wanted, if known.
    """
    found = ", ".join(f"{word} {value}" for word, value in values.items())
    reason = f"{what}: {found}" if found else what
    return dict(zip(QUARANTINE_KEYS, (str(path), number, reason, row), strict=True))


@dataclass(slots=True)
class Rows:
    """The rows of a block that contain texts, and the wrong rows.

    Attributes:
        count: number of rows, including blank ones.
        size: bytes of the block, decompressed.
        numbers: number in the block, from 0, of each row with texts.
        texts: the texts of each such row, one per key.
    """

    count: int = 0
    size: int = 0
    numbers: list[int] = field(default_factory=list)
    texts: list[tuple[TextOrSentences, ...]] = field(default_factory=list)
    errors: list[RowError] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Objects:
    """The rows of a block as objects, for an adapter.

    Attributes:
        count, size: as in Rows.
        items: number in the block, from 0, of each row that is not blank, and its values or its error.
    """

    count: int
    size: int
    items: list[tuple[int, dict[str, Any] | RowError]]


class Block(Protocol):
    """Part of an input.

    Attributes:
        end: start of the next block, for `streams.read_blocks`.
        consumed_bytes: bytes of the file on disk since the previous block, for a progress bar.
    """

    @property
    def end(self) -> int: ...

    @property
    def consumed_bytes(self) -> int: ...

    def rows(self, keys: Sequence[str]) -> Rows: ...

    def objects(self) -> Objects: ...


@dataclass(frozen=True, slots=True)
class JsonLines:
    """Lines of JSON: their bytes, or their range in a plain file."""

    path: Path
    start: int
    end: int
    consumed_bytes: int
    data: bytes | None = None

    def rows(self, keys: Sequence[str]) -> Rows:
        data = self._load()
        if isinstance(data, RowError):
            return Rows(errors=[data])
        rows = Rows(0, len(data))
        view = memoryview(data)
        position = 0
        get_text = value_getter(keys[0]) if len(keys) == 1 else None
        while position < len(data):
            number = rows.count
            begin = position
            end = data.find(b"\n", position)
            end = len(data) if end < 0 else end
            rows.count = number + 1
            position = end + 1
            if get_text is not None:  # fast path for the usual case
                try:
                    text = get_text(orjson.loads(view[begin:end]))
                except (ValueError, TypeError, KeyError):
                    text = None
                if type(text) is str:
                    rows.numbers.append(number)
                    rows.texts.append((text,))
                    continue
            texts = _parse_texts(number, data[begin:end], keys)
            if isinstance(texts, RowError):
                rows.errors.append(texts)
            elif texts is not None:
                rows.numbers.append(number)
                rows.texts.append(texts)
        return rows

    def objects(self) -> Objects:
        data = self._load()
        if isinstance(data, RowError):
            return Objects(0, 0, [(0, data)])
        lines = data.split(b"\n")
        count = len(lines) - (not lines[-1])
        parsed = ((number, _parse_object(number, line, "an object")) for number, line in enumerate(lines))
        return Objects(
            count, len(data), [(number, values) for number, values in parsed if values is not None]
        )

    def _load(self) -> bytes | RowError:
        """Return the bytes, or why they cannot be read."""
        if self.data is not None:
            return self.data
        try:
            return self._read()
        except OSError as error:
            reason, wanted = error.strerror or type(error).__name__, "a readable file"
            return RowError(0, "not readable", reason, wanted, is_fatal=True)

    def _read(self) -> bytes:
        with self.path.open("rb") as file:
            file.seek(self.start)
            data = file.read(self.end - self.start)
        if len(data) < self.end - self.start:
            raise OSError(None, "the file is shorter than it was")
        return data


@dataclass(frozen=True, slots=True)
class PlainText:
    """Text without structure: each line, each paragraph, or all of it is a row."""

    end: int
    consumed_bytes: int
    data: bytes
    unit: str

    def rows(self, keys: Sequence[str]) -> Rows:
        rows = Rows(0, len(self.data))
        for number, part in self._parts():
            if not part.strip():
                continue
            try:
                text = part.decode("utf-8")
            except UnicodeDecodeError as error:
                raw = part.decode("utf-8", "replace")
                rows.errors.append(
                    RowError(number, "not UTF-8", f"byte {error.start} of it", "text in UTF-8", raw)
                )
                continue
            rows.numbers.append(number)
            rows.texts.append((text,) * len(keys))
        rows.count = self.data.count(b"\n") + (not self.data.endswith(b"\n"))
        return rows

    def objects(self) -> Objects:
        return _text_objects(self.rows(("text",)))

    def _parts(self) -> list[tuple[int, bytes]]:
        """Return each part with the number of its first line, from 0."""
        begins_file = self.end == len(self.data)
        data = self.data.removeprefix(BOM) if begins_file else self.data
        if self.unit == "file":
            return [(0, data)]
        if self.unit == "line":
            return [(number, line.rstrip(b"\r")) for number, line in enumerate(data.split(b"\n"))]
        parts = list[tuple[int, bytes]]()
        line = 0
        for part in PARAGRAPH_END.split(data):
            if text := part.strip(b"\r\n"):
                parts.append((line + part[: part.find(text)].count(b"\n"), text))
            line += part.count(b"\n")
        return parts


@dataclass(frozen=True, slots=True)
class TableBlock:
    """Rows of a table, in Arrow's stream format."""

    end: int
    consumed_bytes: int
    data: bytes

    def rows(self, keys: Sequence[str]) -> Rows:
        table = self._table()
        columns = [_column(table, key).to_pylist() for key in keys]
        rows = Rows(table.num_rows, table.nbytes)
        for number, values in enumerate(zip(*columns, strict=True)):
            row_error = _value_error(number, keys, values)
            if row_error is not None:
                rows.errors.append(row_error)
            else:
                rows.numbers.append(number)
                rows.texts.append(values)
        return rows

    def objects(self) -> Objects:
        table = self._table()
        return Objects(table.num_rows, table.nbytes, list(enumerate(table.to_pylist())))

    def _table(self) -> Any:
        with import_module("pyarrow").ipc.open_stream(io.BytesIO(self.data)) as stream:
            return stream.read_all()


def _column(table: Any, key: str) -> Any:
    """Return a column of a table, or a field of a nested one."""
    if key in table.column_names:
        return table.column(key)
    head, _, rest = key.partition(".")
    return import_module("pyarrow.compute").struct_field(table.column(head), rest.split("."))


@dataclass(frozen=True, slots=True)
class DamagedBlock:
    """The rest of a damaged file: one error, after which the input ends."""

    what: str
    found: str
    end: int = DAMAGED_POSITION
    consumed_bytes: int = 0

    def rows(self, keys: Sequence[str]) -> Rows:
        wanted = "a complete file; the rest of it is skipped"
        return Rows(errors=[RowError(0, self.what, self.found, wanted, ends_file=True)])

    def objects(self) -> Objects:
        return _text_objects(self.rows(()))


def _text_objects(rows: Rows) -> Objects:
    """Return rows of one text each as objects with the key "text"."""
    items: list[tuple[int, dict[str, Any] | RowError]] = [(error.row, error) for error in rows.errors]
    items += [(number, {"text": text}) for number, (text,) in zip(rows.numbers, rows.texts, strict=True)]
    return Objects(rows.count, rows.size, sorted(items, key=itemgetter(0)))


def parse_json(line: bytes) -> Any:
    """Parse a line as Python's `json` does: NaN and Infinity are numbers; a BOM is skipped.

    Raises:
        orjson.JSONDecodeError: the line is not JSON in UTF-8.
    """
    line = line.removeprefix(BOM)
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        if b"NaN" not in line and b"Infinity" not in line:
            raise
        try:
            return json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError):
            pass
        raise


def _parse_texts(
    number: int, line: bytes, keys: Sequence[str]
) -> tuple[TextOrSentences, ...] | RowError | None:
    """Parse the texts on a line; None for a blank one."""
    values = _parse_object(number, line, f"an object with {_quote_keys(keys)}")
    if values is None or isinstance(values, RowError):
        return values
    return find_texts(number, values, keys, line)


def _parse_object(number: int, line: bytes, wanted: str) -> dict[str, Any] | RowError | None:
    """Parse the object on a line; None for a blank one."""
    try:
        values = parse_json(line)
    except orjson.JSONDecodeError as error:
        if not line.removeprefix(BOM).strip():
            return None
        # its line number is always 1
        return _line_error(
            number, "not JSON", f"{error.msg} at column {error.colno}", "one object per line, in UTF-8", line
        )
    if not isinstance(values, dict):
        return _line_error(number, "not a JSON object", type(values).__name__, wanted, line)
    return values


def find_texts(
    number: int, values: Mapping[str, Any], keys: Sequence[str], row: bytes | str
) -> tuple[TextOrSentences, ...] | RowError:
    """Return the texts of an object under the keys.

    Args:
        number: number of the row in its block, from 0.
        row: the row itself, for an error.
    """
    texts = list[Any]()
    for key in keys:
        try:
            texts.append(value_at(values, key))
        except KeyError:
            names = ", ".join(list(values)[:8]) or "no keys"
            return _line_error(number, f"no key {key!r}", names, f"{_quote_keys(keys)} (see --json-key)", row)
    row_error = _value_error(number, keys, texts)
    return (
        tuple(texts)
        if row_error is None
        else _line_error(number, row_error.what, row_error.found, row_error.wanted, row)
    )


def _value_error(number: int, keys: Sequence[str], values: Sequence[Any]) -> RowError | None:
    for key, value in zip(keys, values, strict=True):
        if isinstance(value, str):
            continue
        if not isinstance(value, list):
            return RowError(number, f"the value of {key!r}", type(value).__name__, "a string", repr(value))
        if wrong_types := [type(item).__name__ for item in value if not isinstance(item, str)]:
            return RowError(number, f"an item of {key!r}", wrong_types[0], "a string", repr(value))
    return None


def _line_error(number: int, what: str, found: str, wanted: str, line: bytes | str) -> RowError:
    raw = line if isinstance(line, str) else line.decode("utf-8", "replace")
    return RowError(number, what, found, wanted, raw)


def _quote_keys(keys: Sequence[str]) -> str:
    return ", ".join(map(repr, keys))
