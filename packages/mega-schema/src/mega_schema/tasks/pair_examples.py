"""Examples of classification: a text or a pair of texts with a class, from Megatron's files of MNLI and QQP.

MNLI and QQP are GLUE's files: values separated by tabs, without quotes, under a line of names. A file without
the column of labels is a test set.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from mega_schema.errors import FormatError

MNLI_LABELS = ("contradiction", "entailment", "neutral")
QQP_LABELS = ("0", "1")
_MNLI_TEXTS, _MNLI_TEST_COLUMNS = (8, 9), 10
_QQP_TEXTS, _QQP_TEST_TEXTS = (3, 4), (1, 2)
_QQP_COLUMNS, _QQP_TEST_COLUMNS = 6, 3


@dataclass(frozen=True, slots=True)
class PairExample:
    """A text, or a pair of texts, with its class.

    Attributes:
        id: unique within its file.
        label: the name of the class; None in a test set.
        where: "file:line", for messages.
    """

    id: str
    first: str
    second: str | None
    label: str | None
    where: str


def clean_text(text: str) -> str:
    """Return the text with single spaces, and none before a full stop between words, as Megatron does."""
    single_spaced = re.sub(r"\s+", " ", text)
    for _ in range(3):  # Megatron's number: stops that share a space are found in turn
        single_spaced = single_spaced.replace(" . ", ". ")
    return single_spaced


UNREADABLE = (UnicodeDecodeError, EOFError, OSError, zlib.error)  # of a text that may be compressed


def open_text(path: Path) -> TextIO:
    """Open a text file, which may be compressed by gzip.

    Raises:
        FormatError: it cannot be opened.
    """
    try:
        if path.suffix == ".gz":
            return gzip.open(path, "rt", encoding="utf-8", newline="")
        return path.open(encoding="utf-8", newline="")
    except OSError as error:
        raise FormatError(path, "cannot be read", found=error.strerror) from None


def read_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield "file:line" and the text of every line, without its end.

    Raises:
        FormatError: the file cannot be read, or is not UTF-8.
    """
    with open_text(path) as file:
        try:
            for number, line in enumerate(file, 1):
                yield f"{path}:{number}", line.rstrip("\r\n").removeprefix("\ufeff" if number == 1 else "")
        except UNREADABLE as error:
            raise unreadable_error(path, error) from None


def unreadable_error(path: Path, error: Exception) -> FormatError:
    """Return the error of a file whose reading failed with one of UNREADABLE."""
    what = "is not text in UTF-8" if isinstance(error, UnicodeDecodeError) else "is damaged"
    return FormatError(path, what, found=error)


def read_mnli(path: Path) -> list[PairExample]:
    """Read a file of MNLI: id in column 1, texts in 9 and 10, the label in the last if there are more.

    Raises:
        FormatError: the file is not one of MNLI.
    """
    rows = _read_rows(path)
    _, header = rows[0]
    if len(header) < _MNLI_TEST_COLUMNS:
        raise FormatError(
            path,
            "has too few columns for MNLI",
            found=f"{len(header)} columns",
            wanted=f"{_MNLI_TEST_COLUMNS} of a test set, or more with the label in the last",
            hint="mega-train finetune --task CLASSIFY and mega-eval classify read other columns",
        )
    has_labels = len(header) > _MNLI_TEST_COLUMNS
    examples = []
    for where, row in rows[1:]:
        if len(row) != len(header):
            raise FormatError(
                where, "another number of columns than the first line", found=len(row), wanted=len(header)
            )
        first, second = (clean_text(row[column]) for column in _MNLI_TEXTS)
        label = row[-1].strip() if has_labels else None
        examples.append(PairExample(row[0], first, second, _check_label(label, MNLI_LABELS, where), where))
    return examples


def read_qqp(path: Path) -> tuple[list[PairExample], int]:
    """Read a file of QQP: id, two ids of questions, two questions, label; or of a test set id and questions.

    Returns:
        the examples, and the number of rows without these columns, which are left out as in Megatron.

    Raises:
        FormatError: the file is not one of QQP, or a label is unknown.
    """
    rows = _read_rows(path)
    _, header = rows[0]
    if len(header) not in (_QQP_TEST_COLUMNS, _QQP_COLUMNS):
        raise FormatError(
            path,
            "does not have the columns of QQP",
            found=f"{len(header)} columns",
            wanted=f"{_QQP_COLUMNS}, or {_QQP_TEST_COLUMNS} of a test set",
            hint="mega-train finetune --task CLASSIFY and mega-eval classify read other columns",
        )
    has_labels = len(header) == _QQP_COLUMNS
    examples = []
    for where, row in rows[1:]:
        if len(row) != len(header):
            continue
        first, second = (clean_text(row[i]) for i in (_QQP_TEXTS if has_labels else _QQP_TEST_TEXTS))
        if not first.strip() or not second.strip():
            continue
        label = _check_label(row[-1].strip() if has_labels else None, QQP_LABELS, where)
        examples.append(PairExample(row[0], first, second, label, where))
    return examples, len(rows) - 1 - len(examples)


def _read_rows(path: Path) -> list[tuple[str, list[str]]]:
    rows = [(where, line.split("\t")) for where, line in read_lines(path) if line.strip()]
    if len(rows) < 2:
        raise FormatError(path, "contains no example", found=f"{len(rows)} lines", wanted="a line of names")
    return rows


def _check_label(label: str | None, labels: Sequence[str], where: str) -> str | None:
    if label is not None and label not in labels:
        raise FormatError(where, "unknown label", found=label, wanted=" | ".join(labels))
    return label
