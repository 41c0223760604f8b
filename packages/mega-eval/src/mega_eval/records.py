"""Read the records of a task: JSON lines, CSV, TSV, or a folder of RACE passages or MMLU subjects.

A compressed file has a name that ends in `.gz` or `.zst`. Imports no numpy, for `--help`.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mega_eval.compressed_file import JSON_LINES, base_suffix, open_file, read_utf8
from mega_eval.input_paths import build_path_error
from mega_eval.json_text import parse_object
from mega_schema.errors import FormatError

# name of the file, uncompressed -> how its lines are read
_CSV = ".csv"
_TSV = ".tsv"


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """One example of a task file, as it stands there.

    Attributes:
        where: "file:line" of the record, for error messages.
        values: its keys and values; those of CSV and TSV files are strings.
        id: name of the file and line, without folders; of a file with one record, its folder and name.
    """

    where: str
    values: Mapping[str, object]
    id: str = ""

    def has(self, key: str) -> bool:
        """Return whether the record has a value under `key`."""
        return self.values.get(key) is not None

    def value(self, key: str) -> object:
        """Return the value under `key`.

        Raises:
            FormatError: there is none.
        """
        if key not in self.values:
            keys = ", ".join(sorted(self.values)) or "an empty object"
            raise FormatError(self.where, f"no key {key!r}", found=keys, wanted=key)
        return self.values[key]

    def text(self, key: str) -> str:
        """Return the string under `key`; a number becomes its decimal text.

        Raises:
            FormatError: there is none.
        """
        value = self.value(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return str(value)
        if not isinstance(value, str):
            raise FormatError(
                f"{self.where} {key}", "not text", found=type(value).__name__, wanted="a string"
            )
        return value

    def texts(self, key: str) -> list[str]:
        """Return the list of strings under `key`.

        Raises:
            FormatError: there is none.
        """
        value = self.value(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise FormatError(
                f"{self.where} {key}",
                "not a list of strings",
                found=_describe(value),
                wanted='["...", "..."]',
            )
        return [str(item) for item in value]

    def read_objects(self, key: str) -> list[TaskRecord]:
        """Return the list of objects under `key` as records.

        Raises:
            FormatError: there is none.
        """
        value = self.value(key)
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise FormatError(
                f"{self.where} {key}", "not a list of objects", found=_describe(value), wanted="[{...}, ...]"
            )
        return [TaskRecord(f"{self.where} {key} {number}", item) for number, item in enumerate(value, 1)]

    def read_object(self, key: str) -> TaskRecord:
        """Return the object under `key` as a record.

        Raises:
            FormatError: there is none.
        """
        value = self.value(key)
        if not isinstance(value, dict):
            raise FormatError(f"{self.where} {key}", "not an object", found=_describe(value), wanted="{...}")
        return TaskRecord(f"{self.where} {key}", value)


def list_record_files(path: Path, suffixes: Sequence[str] = ()) -> list[Path]:
    """List the file of a task, or the files of its folder whose names end in one of `suffixes`, by name.

    Raises:
        FormatError: there is no such file, the task reads no folders, or the folder has no such files.
    """
    if path.is_dir():
        if not suffixes:
            raise build_path_error(path, "file")
        files = sorted(
            file for file in path.rglob("*") if file.is_file() and file.name.endswith(tuple(suffixes))
        )
        if not files:
            raise FormatError(
                path, "no such files in the folder", wanted=" or ".join(f"*{s}" for s in suffixes)
            )
        return files
    if not path.is_file():
        wanted = f"a file, or a folder with {' or '.join(f'*{s}' for s in suffixes)}" if suffixes else ""
        raise build_path_error(path, "file", wanted)
    return [path]


def is_record_file(path: Path) -> bool:
    """Whether the name of a file is that of JSON lines, CSV or TSV, also compressed."""
    return base_suffix(path) in (*JSON_LINES, _CSV, _TSV)


def read_records(files: Sequence[Path], columns: Sequence[str] = ()) -> list[TaskRecord]:
    """Read the records of files; blank lines are skipped.

    Args:
        columns: names of the columns of CSV files that have no header.

    Raises:
        FormatError: a file is not text, is damaged, has no records, or a line has another format.
    """
    records: list[TaskRecord] = []
    for path in files:
        before = len(records)
        records.extend(_read_file(path, columns))
        if len(records) == before:
            raise FormatError(path, "no records in the file")
    return records


def read_text_of(path: Path) -> str:
    """Read a UTF-8 file, uncompressed if its name ends in .gz or .zst.

    Raises:
        FormatError: it is damaged or not UTF-8.
    """
    return read_utf8(path, "utf-8-sig")


def read_bytes_of(path: Path) -> bytes:
    """Read a file, uncompressed if its name ends in .gz or .zst.

    Raises:
        FormatError: the compressed data is damaged.
        ConfigError: the library for .zst is not installed.
    """
    with open_file(path) as file:
        return file.read()


def _read_file(path: Path, columns: Sequence[str]) -> Iterator[TaskRecord]:
    suffix = base_suffix(path)
    if suffix == ".txt":  # a RACE passage: the whole file is one object
        yield TaskRecord(f"{path}", parse_object(read_text_of(path), path), f"{path.parent.name}/{path.name}")
    elif suffix in JSON_LINES:
        # only \n ends a line: texts contain U+2028 and the like
        for number, line in enumerate(read_text_of(path).split("\n"), 1):
            if line.strip():
                values = parse_object(line, path, number)
                yield TaskRecord(f"{path}:{number}", values, f"{path.name}:{number}")
    elif suffix in (_CSV, _TSV):
        yield from _read_table(path, suffix, columns)
    else:
        wanted = ", ".join((*JSON_LINES, _CSV, _TSV))
        raise FormatError(path, "no known ending of a task file", found=suffix or path.name, wanted=wanted)


def _read_table(path: Path, suffix: str, columns: Sequence[str]) -> Iterator[TaskRecord]:
    """Yield the rows of a CSV file, or of a TSV file, in which quotes have no meaning (as in GLUE)."""
    text = io.StringIO(read_text_of(path), newline="")
    if suffix == _TSV:
        reader = csv.reader(text, delimiter="\t", quoting=csv.QUOTE_NONE)
    else:
        reader = csv.reader(text, strict=True)
    header = list(columns)
    line = 1
    try:
        for row in reader:
            start, line = line, reader.line_num + 1
            if not row:
                continue
            if not header:
                header = row
                continue
            if len(row) != len(header):
                raise FormatError(
                    f"{path}:{start}",
                    "wrong number of columns",
                    found=len(row),
                    wanted=f"{len(header)} ({', '.join(header)})",
                )
            yield TaskRecord(f"{path}:{start}", dict(zip(header, row, strict=True)), f"{path.name}:{start}")
    except csv.Error as error:
        raise FormatError(f"{path}:{line}", f"not {suffix[1:].upper()}", found=str(error)) from None


def _describe(value: object) -> str:
    return "null" if value is None else type(value).__name__
