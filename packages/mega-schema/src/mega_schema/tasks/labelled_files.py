"""Read examples of any classification from JSON lines, CSV or TSV, also compressed by gzip."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from mega_schema.errors import FormatError
from mega_schema.tasks.pair_examples import UNREADABLE, PairExample, open_text, read_lines, unreadable_error

_DELIMITERS: Mapping[str, str] = MappingProxyType({".csv": ",", ".tsv": "\t"})
_JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")


def read_records(path: Path) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yield "file:line" and the values of every record; those of CSV and TSV are strings.

    Raises:
        FormatError: the name has no known suffix, or a line is not a record.
    """
    suffix = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    if suffix in _JSON_SUFFIXES:
        yield from _read_json_lines(path)
    elif suffix in _DELIMITERS:
        yield from _read_table(path, _DELIMITERS[suffix])
    else:
        wanted = "a name that ends in .jsonl, .csv or .tsv, or in one of them with .gz"
        raise FormatError(path, "format not known", found=suffix or "no suffix", wanted=wanted)


def read_labelled(path: Path, text_keys: Sequence[str], label_key: str) -> list[PairExample]:
    """Read texts and labels of every record; a file without labels is a test set.

    Args:
        text_keys: of the text, or of the two texts.

    Raises:
        FormatError: a record lacks a text, or only some records lack the label.
    """
    examples = []
    for where, record in read_records(path):
        texts = [find_text(where, record, key, hint="--text-keys KEY [KEY]") for key in text_keys]
        label = _format_label(where, record.get(label_key))
        number = where.rpartition(":")[2]
        second = texts[1] if len(texts) > 1 else None
        examples.append(PairExample(str(record.get("id", number)), texts[0], second, label, where))
    if not examples:
        raise FormatError(path, "contains no example", found="no record", wanted="one on each line")
    unlabelled = next((example for example in examples if example.label is None), None)
    if unlabelled is not None and any(example.label is not None for example in examples):
        raise FormatError(unlabelled.where, f"no key {label_key!r}", wanted="a label, as other records have")
    return examples


def _read_json_lines(path: Path) -> Iterator[tuple[str, Mapping[str, object]]]:
    for where, line in read_lines(path):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise FormatError(where, "is not JSON", found=error) from None
        if not isinstance(record, dict):
            raise FormatError(where, "is not an object", found=type(record).__name__, wanted="{...}")
        yield where, record


def _read_table(path: Path, delimiter: str) -> Iterator[tuple[str, Mapping[str, object]]]:
    with open_text(path) as file:
        reader = csv.DictReader(file, delimiter=delimiter, strict=True)
        try:
            names = reader.fieldnames or ()
            if len(set(names)) < len(names):
                columns = ", ".join(name for name, count in Counter(names).items() if count > 1)
                raise FormatError(f"{path}:1", "names a column twice", found=columns)
            for row in reader:
                where = f"{path}:{reader.line_num}"
                if None in row or None in row.values():
                    wanted = f"{len(reader.fieldnames or ())} columns"
                    raise FormatError(where, "another number of columns than the first line", wanted=wanted)
                yield where, row
        except UNREADABLE as error:
            raise unreadable_error(path, error) from None
        except csv.Error as error:
            raise FormatError(path, "is not a table", found=error) from None


def find_text(where: str, record: Mapping[str, object], key: str, *, hint: str) -> str:
    """Return the text of a record under a key.

    Args:
        hint: the option that names the key.

    Raises:
        FormatError: there is no text under the key.
    """
    value = record.get(key)
    if not isinstance(value, str):
        found = ", ".join(sorted(record)) if key not in record else type(value).__name__
        raise FormatError(where, f"no text under {key!r}", found=found, hint=hint)
    return value


def _format_label(where: str, value: object) -> str | None:
    """Return a label as text; booleans as in JSON."""
    if value is None:
        return None
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str | int):
        raise FormatError(where, "a label is no name", found=type(value).__name__, wanted="text or a number")
    return str(value)
