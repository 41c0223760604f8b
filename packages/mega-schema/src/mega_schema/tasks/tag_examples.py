"""Words with their tags, from JSON lines or from columns.

    {"tokens": ["EU", "rejects"], "tags": ["B-ORG", "O"]}

Other files have a word on each line: the word in the first column, its tag in the last (CoNLL-2003). An empty
line ends a sentence; lines that begin with -DOCSTART- are left out. A file without tags is a test set.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mega_schema.errors import ConfigError, FormatError
from mega_schema.tasks.labelled_files import read_records
from mega_schema.tasks.pair_examples import read_lines

_JSON_SUFFIXES = frozenset({".jsonl", ".json", ".ndjson"})
_DOCUMENT = "-DOCSTART-"


@dataclass(frozen=True, slots=True)
class TagExample:
    """A sentence.

    Attributes:
        id: unique within its file.
        tags: of each word; None in a test set.
        where: "file:line", for messages.
    """

    id: str
    words: tuple[str, ...]
    tags: tuple[str, ...] | None
    where: str


def read_tags(path: Path) -> list[TagExample]:
    """Read the sentences of a file, also compressed by gzip.

    Raises:
        FormatError: the file has no sentence, or one has another number of tags than of words.
    """
    suffix = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    examples = list(_read_json_lines(path) if suffix in _JSON_SUFFIXES else _read_columns(path))
    if not examples:
        wanted = "one on each line of JSON lines, or words in the first column"
        raise FormatError(path, "contains no example", found="no sentence", wanted=wanted)
    untagged = next((example for example in examples if example.tags is None), None)
    if untagged is not None and any(example.tags is not None for example in examples):
        raise FormatError(untagged.where, "has no tags", wanted="tags, as other sentences have")
    return examples


def choose_tags(names: Sequence[str], examples: Sequence[TagExample]) -> tuple[str, ...]:
    """Return the tags in the order of the head's outputs: those given, or those of the data, sorted.

    Raises:
        ConfigError: there are fewer than two different ones.
    """
    tags = tuple(names) or tuple(sorted({tag for example in examples for tag in example.tags or ()}))
    if len(tags) < 2 or len(set(tags)) < len(tags):
        flag = "--labels" if names else "--train-data"
        raise ConfigError(flag, "has fewer than two tags", found=" ".join(tags) or "none")
    return tags


def check_tags(examples: Sequence[TagExample], tags: Sequence[str], *, required: bool) -> None:
    """Check that every tag is known.

    Args:
        required: a sentence without tags is an error.

    Raises:
        FormatError: a tag is unknown, or missing.
    """
    known = set(tags)
    for example in examples:
        if example.tags is None:
            if required:
                raise FormatError(example.where, "has no tags", wanted="a tag for each word")
        elif unknown := [tag for tag in example.tags if tag not in known]:
            raise FormatError(example.where, "unknown label", found=unknown[0], wanted=" | ".join(tags))


def _read_json_lines(path: Path) -> Iterator[TagExample]:
    for where, record in read_records(path):
        words = _find_texts(where, record, "tokens")
        if not words:
            raise FormatError(f"{where}: tokens", "is empty", wanted="one or more words")
        tags = _find_texts(where, record, "tags") if record.get("tags") is not None else None
        if tags is not None and len(tags) != len(words):
            raise FormatError(
                where, "tokens and tags differ in number", found=f"{len(words)} and {len(tags)}"
            )
        number = where.rpartition(":")[2]
        yield TagExample(str(record.get("id", number)), words, tags, where)


def _find_texts(where: str, record: Mapping[str, object], key: str) -> tuple[str, ...]:
    value = record.get(key)
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        found = ", ".join(sorted(record)) if key not in record else str(value)[:80]
        raise FormatError(where, f"no list of texts under {key!r}", found=found)
    return tuple(value)


def _read_columns(path: Path) -> Iterator[TagExample]:
    columns = 0  # of all lines
    rows = list[tuple[str, list[str]]]()
    number = 0
    for where, line in (*read_lines(path), (f"{path}", "")):
        row = line.split()
        if row and row[0] == _DOCUMENT:
            continue
        if row:
            columns = columns or len(row)
            if len(row) != columns:
                what = "another number of columns than the first line"
                raise FormatError(where, what, found=len(row), wanted=columns)
            rows.append((where, row))
        elif rows:
            number += 1
            words = tuple(row[0] for _, row in rows)
            tags = tuple(row[-1] for _, row in rows) if columns > 1 else None
            yield TagExample(str(number), words, tags, rows[0][0])
            rows = []
