"""Shards: files of documents in any format, read line by line as JSON and written atomically."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, Final, Self

import orjson

from mega_data.error_limit import error_counts
from mega_data.output_formats import formatted_name, open_output
from mega_data.range_lines import dump_row, read_range_lines
from mega_data.readers.adapters import Adapter
from mega_data.readers.arrow import read_rows
from mega_data.readers.blocks import parse_json, quarantine_row
from mega_data.readers.compression import open_decompressed, strip_extension
from mega_data.readers.csv_table import read_csv_lines
from mega_data.readers.inputs import HUB_FORMAT, InputFile, expand_inputs, format_of_name
from mega_data.readers.nested_keys import value_at, value_or_none
from mega_data.readers.ranges import InputRange, count_rows_before
from mega_data.readers.versions import changed_error, check_unchanged, report_unreadable
from mega_data.texts import dump_line, exact_numbers, text_of
from mega_schema.errors import ConfigError, CorruptFileError, FormatError
from mega_schema.remote_files import path_of

Source = Path | InputRange
"""A file of documents, or a range of one."""


def path_of_source(source: Source) -> Path:
    return source.item.path if isinstance(source, InputRange) else source


def find_shards(words: Iterable[str | Path]) -> list[Path]:
    """Return the files that the words name, see `find_inputs`."""
    return [item.path for item in find_inputs(words)]


def find_inputs(words: Iterable[str | Path], adapter: Adapter | None = None) -> list[InputFile]:
    """Return the files that the words name, see `readers.inputs.expand_inputs`, sorted by output name.

    Raises:
        ConfigError: two files have the same output name, or there is no file.
    """
    wanted = "a file, a glob, or a folder with .jsonl, .json, .csv or .parquet files"
    files = expand_inputs([str(word) for word in words], wanted=wanted, adapter=adapter)
    inputs = {item.path: item for item in files}
    for item in inputs.values():
        if item.format == HUB_FORMAT:
            name = item.hub_dataset.name
            hint = f"datasets.load_dataset({name!r}, ...).save_to_disk('saved'), then --input saved"
            raise ConfigError("--input", "needs files, not a dataset name", found=item.path, hint=hint)
        if item.is_stream:
            name = "stdin" if item.is_stdin else "a pipe"
            what, hint = f"{name} is read once, and this command reads twice", "name a file"
            raise ConfigError("--input", what, hint=hint)
    paths = sorted(inputs, key=lambda path: (output_name(path), path))
    for path, following in pairwise(paths):
        if output_name(path) == output_name(following):
            raise ConfigError("--input", f"two files of one name: {path} and {following}", hint="rename one")
    return [inputs[path] for path in paths]


def output_name(path: Path, suffix: str = "") -> str:
    """Return the name of the output of a file.

    Args:
        suffix: suffix of its format, see `output_formats`; "" is JSON lines, not compressed.
    """
    name = strip_extension(path)
    if format_of_name(path) in ("table", "csv"):
        name = f"{name.rpartition('.')[0]}.jsonl"
    return formatted_name(name, suffix)


_NO_COLUMNS: Final = MappingProxyType[str, str]({})


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a shard with their line breaks; a row of a table or of CSV as JSON.

    Raises:
        ConfigError: a library that the format needs is not installed.
        FormatError: the file is damaged.
    """
    return (line for _, line in _read_numbered_lines(path))


def _read_numbered_lines(
    source: Source, columns: Mapping[str, str] = _NO_COLUMNS
) -> Iterator[tuple[int, bytes]]:
    """Yield the number of each line in the file or range, from 1, and the line, see `read_lines`.

    Args:
        columns: columns that a CSV file must have, each with the option that names it.
    """
    if isinstance(source, InputRange) and (source.item.adapter or not source.is_whole):
        yield from read_range_lines(source)
        return
    path = path_of_source(source)
    if format_of_name(path) == "table":
        with check_unchanged(path):
            for number, row in enumerate(read_rows(path), 1):
                yield number, dump_row(row)
    elif format_of_name(path) == "csv":
        yield from read_csv_lines(path, columns)
    else:
        with open_decompressed(path) as file:
            yield from enumerate(file, 1)


RowErrorHandler = Callable[[int, FormatError, bytes], object]
"""Called with a line that is not a document: its number in the file, from 1, its error and the line."""


def fail_on_row(number: int, error: FormatError, line: bytes) -> None:
    """Raise the error: the first wrong line ends the run."""
    raise error


def skip_row(number: int, error: FormatError, line: bytes) -> None:
    """Ignore the line: an earlier reader of the shard has handled it."""


class Quarantine:
    """The lines of a shard that are not documents, in the format of `preprocess`'s quarantine.

    The lines of a range have their numbers in it.

    The file is created at the first such line and published when the block ends without an error.

    Attributes:
        count: number of those lines.
        first: place and error of the first.
        damaged: the shard and why its rest was skipped; "" if it was not.
    """

    def __init__(self, path: Path, shard: Source) -> None:
        self.path = path
        self.shard = shard
        self.count = 0
        self.first = ""
        self.damaged = ""
        self._stack = ExitStack()
        self._out: IO[bytes] | None = None

    def __enter__(self) -> Self:
        self.path.unlink(missing_ok=True)  # of a task that ended before its marker was written
        return self

    def __exit__(self, *ended: Any) -> None:
        self._stack.__exit__(*ended)

    def __call__(self, number: int, error: FormatError, line: bytes) -> None:
        self._out = self._out or self._stack.enter_context(open_output(self.path))
        row = line.decode("utf-8", "replace").rstrip("\r\n")
        self._out.write(
            dump_line(quarantine_row(path_of_source(self.shard), number, error.what, error.values, row))
        )
        self.first = self.first or f"{_place(self.shard, number)}, {error.what}"
        self.count += 1
        if isinstance(error, CorruptFileError):
            self.damaged = str(error)

    def line_numbers(self) -> set[int]:
        """Return the numbers of those lines, from 1, as an earlier task wrote them."""
        if not self.path.exists():
            return set()
        with self.path.open("rb") as file:
            return {orjson.loads(line)["line"] for line in file}


def quarantine_counts(quarantine: Quarantine | None, rows: int) -> dict[str, Any]:
    """Build the part of a task's result that reports its quarantined lines."""
    if quarantine is None:
        return {"skipped": 0, **error_counts(0, "", rows)}
    count = quarantine.count
    return {"skipped": count, **error_counts(count, quarantine.first, rows + count, quarantine.damaged)}


def _place(source: Source, number: int) -> str:
    """Describe the place of a line."""
    return source.place(number) if isinstance(source, InputRange) else f"{source}:{number}"


def exact_place(source: Source, number: int) -> str:
    """Describe the place of a line of a range by its number in the file; counts the lines before."""
    if isinstance(source, InputRange) and (before := count_rows_before(source)) is not None:
        return f"{source.item.path}:{before + number}"
    return _place(source, number)


def _has_wrong_rows(source: Source) -> bool:
    """Return whether a list among the lines of a source is a wrong row, see `read_csv_lines`."""
    has_adapter = isinstance(source, InputRange) and source.item.adapter is not None
    return has_adapter or format_of_name(path_of_source(source)) == "csv"


def parse_document(line: bytes, source: Source, number: int, key: str, id_key: str = "") -> dict[str, Any]:
    """Parse the object on a line, with a text or sentences under `key` and, if named, an id under `id_key`.

    Raises:
        FormatError: the line has no such object; the message begins with file and line.
    """
    hint = "correct or delete the line, or skip such lines: --on-error skip"
    try:
        values = parse_json(line)
    except orjson.JSONDecodeError as error:
        position = f"{error.msg} at column {error.colno}"
        where = _place(source, number)
        raise FormatError(
            where, "not JSON", found=position, wanted="one object per line, in UTF-8", hint=hint
        ) from None
    if (
        isinstance(values, dict)
        and _is_text(value_or_none(values, key))
        and (not id_key or isinstance(value_or_none(values, id_key), str | int))
    ):
        return values
    where = _place(source, number)
    if not isinstance(values, dict):
        found, wanted = type(values).__name__, f"an object with {key!r}"
        if isinstance(values, list) and _has_wrong_rows(source):
            what, found, wanted, _ = values
            named_values = {"found": found} | ({"wanted": wanted} if wanted else {})
            raise FormatError(where, what, **named_values, hint=hint)
        raise FormatError(where, "not a JSON object", found=found, wanted=wanted, hint=hint)
    keys = ", ".join(list(values)[:8]) or "no keys"
    if not _is_text(value_or_none(values, key)):
        wanted = "a string there (see --json-key)"
        raise FormatError(where, f"no text under {key!r}", found=keys, wanted=wanted, hint=hint)
    wanted = "a string or a number there (see --id-key)"
    raise FormatError(where, f"no id under {id_key!r}", found=keys, wanted=wanted, hint=hint)


class LineCount:
    """The number of lines that were read, blank and wrong ones included."""

    value = 0


def read_whole_lines(
    source: Source, on_error: RowErrorHandler, key: str = "", id_key: str = "", count: LineCount | None = None
) -> Iterator[tuple[int, bytes]]:
    """Yield line numbers and lines up to the first damage, which is reported as an error of the next line.

    Args:
        key: column that a CSV file must have; "" for none.
        id_key: as `key`.
        count: set to the lines read.
    """
    number = 0
    options = {id_key: "--id-key", key: "--json-key"}
    try:
        with report_unreadable(path_of_source(source)):
            columns = {k: option for k, option in options.items() if k}
            for number, line in _read_numbered_lines(source, columns):
                yield number, line
    except CorruptFileError as error:
        on_error(number + 1, error, b"")
    if count is not None:
        count.value = number


def _is_text(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(s, str) for s in value))


def read_documents(
    source: Source, key: str, on_error: RowErrorHandler, id_key: str = "", count: LineCount | None = None
) -> Iterator[tuple[int, bytes, dict[str, Any]]]:
    """Yield the documents of a shard: the line number from 1, the line, its object.

    Args:
        count: set to the lines read.
    """
    for number, line in read_whole_lines(source, on_error, key, id_key, count):
        if (values := _parse_or_report(line, source, number, key, id_key, on_error)) is not None:
            yield number, line, exact_numbers(line, values)


def read_batches(
    source: Source, key: str, characters: int, on_error: RowErrorHandler, id_key: str = ""
) -> Iterator[tuple[list[str], list[str]]]:
    """Yield texts and ids, one per line of a shard, in lists of about `characters` characters.

    A blank line, or one that is not a document, has an empty text; without an `id_key` there are no ids.
    """
    texts = list[str]()
    ids = list[str]()
    size = 0
    for number, line in read_whole_lines(source, on_error, key, id_key):
        values = _parse_or_report(line, source, number, key, id_key, on_error) or {key: "", id_key: ""}
        texts.append(text_of(values, key))
        if id_key:
            ids.append(str(value_at(values, id_key)))
        size += len(texts[-1]) + 1
        if size >= characters:
            yield texts, ids
            texts = []
            ids = []
            size = 0
    if texts:
        yield texts, ids


def _parse_or_report(
    line: bytes, source: Source, number: int, key: str, id_key: str, on_error: RowErrorHandler
) -> dict[str, Any] | None:
    """Parse the object on a line; None for a blank one, and for one that is not a document."""
    try:
        return parse_document(line, source, number, key, id_key)
    except FormatError as error:
        if line.strip():
            if on_error is fail_on_row:
                where = exact_place(source, number)
                raise FormatError(where, error.what, **error.values, hint=error.hint) from None
            on_error(number, error, _row_of(line, source))
        return None


def _row_of(line: bytes, source: Source) -> bytes:
    """Return a wrong line as it is in the file."""
    if _has_wrong_rows(source) and isinstance(values := parse_json(line), list):
        return str(values[-1]).encode()
    return line


def file_states(files: Sequence[Path]) -> list[list[str | int]]:
    """Return the path, size and mtime of files, by which a later run recognizes them."""
    return [[str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in files]


def check_file_states(inputs: Iterable[Sequence[Any]]) -> None:
    """Check that files are still in their `file_states`.

    Raises:
        FormatError: a file was written, replaced or removed since.
    """
    for name, size, time, *_ in inputs:
        path = path_of(name)
        stat = path.stat() if path.exists() else None
        if stat is None or (stat.st_size, stat.st_mtime_ns) != (size, time):
            raise changed_error(path, size, None if stat is None else stat.st_size)


def file_bytes(file: Path) -> int:
    """Return the bytes on disk; 0 before the stage that writes the file."""
    return file.stat().st_size if file.exists() else 0
