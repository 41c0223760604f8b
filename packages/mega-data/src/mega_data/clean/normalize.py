"""Steps that repair a text and keep the document."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mega_data.clean.step import Row, RowFunction, Verdict, import_for_step

_ENTITY = re.compile("&#?[0-9A-Za-z]{1,24};")  # as in ftfy
_ASCII_CONTROLS = bytes(byte for byte in (*range(32), 127) if byte not in b"\t\n")
# every character that ftfy.fix_text changes, except entities, curly quotes, and those of wrong encodings,
# which `badness` detects: controls, ligatures, line breaks, full width, surrogates
_NOT_QUOTES = re.compile(
    "[\r\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u0132\u0133\u0149\u01c4-\u01cc\u01f1-\u01f3\u2028\u2029"
    "\u206a-\u206f\u3000\ufb00-\ufb06\ufeff\uff01-\uffef\ufff9-\ufffc\ud800-\udfff]"
)
_STRAIGHT_QUOTES = str.maketrans(
    {**dict.fromkeys("\u02bc\u2018\u2019\u201a\u201b", "'"), **dict.fromkeys("\u201c\u201d\u201e\u201f", '"')}
)
_MAX_SEGMENT = 1_000_000  # characters that ftfy decodes at once
# word-boundary line breaks or runs of spaces, as in cleanup_fix_dataset.py's general_cleaning
_WHITESPACE_RUNS = re.compile(r"\s\s+|\b\n+ |\b\n+\b")
_ASCII_PUNCTUATION = str.maketrans(
    {
        **dict.fromkeys("“”„‟«»″〝〞", '"'),
        **dict.fromkeys("‘’‚‛‹›′", "'"),
        **dict.fromkeys("‐‑‒–—―−", "-"),
        **dict.fromkeys(
            "\u00a0\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u3000", " "
        ),
        **dict.fromkeys("\u00ad\u200b\u2060\ufeff", None),
        "…": "...",
    }
)


@dataclass(frozen=True, slots=True)
class FixText:
    """Repair wrong encodings, entities and stray control characters with ftfy."""

    def start(self) -> RowFunction:
        repair = LineRepair(import_for_step("fix-text", "ftfy"))

        def work(row: Row) -> Verdict:
            text = row.text
            if text.isascii() and not _might_change_ascii(text):
                return [row]
            new_text = repair.fix_text(text)
            return [row] if new_text == text else [row.with_values(**{row.key: new_text})]

        return work


class LineRepair:
    """ftfy, called only for the lines that it may change.

    ftfy repairs each line on its own, except that entities stay from the first line with a "<" on.
    """

    def __init__(self, ftfy: Any) -> None:
        self._explain = ftfy.fix_and_explain
        self._is_bad: Callable[[str], bool] = ftfy.badness.is_bad
        with_entities = ftfy.TextFixerConfig(explain=False)
        self._configs = with_entities._replace(unescape_html=False), with_entities

    def fix_text(self, text: str) -> str:
        """Return ftfy.fix_text of a text."""
        has_entities = True
        pieces = list[str]()
        for line in _split_lines(text):
            has_entities = has_entities and "<" not in line
            new_line = None
            if not (has_entities and "&" in line and _ENTITY.search(line)):
                new_line = self._fix_line(line)
            if new_line is None:
                new_line = self._explain(line, self._configs[has_entities]).text
            pieces.append(new_line)
        return "".join(pieces)

    def _fix_line(self, line: str) -> str | None:
        """Return the result of ftfy for a line whose entities stay; None if only ftfy knows it."""
        if line.isascii():
            return None if _has_controls(line) else line
        if _NOT_QUOTES.search(line) or self._needs_decoding(line):
            return None
        straight = line.translate(_STRAIGHT_QUOTES)
        # ftfy repeats its repairs until nothing changes
        return straight if straight == line or not self._needs_decoding(straight) else None

    def _needs_decoding(self, text: str) -> bool:
        """Return whether a text may be in a wrong encoding, or is not in the normalization form NFC."""
        return not text.isascii() and (not unicodedata.is_normalized("NFC", text) or self._is_bad(text))


def _might_change_ascii(text: str) -> bool:
    """Return False if ftfy certainly does not change an ASCII text. Much faster than ftfy."""
    return ("&" in text and _ENTITY.search(text) is not None) or _has_controls(text)


def _has_controls(text: str) -> bool:
    data = text.encode()
    return len(data.translate(None, _ASCII_CONTROLS)) != len(data)


def _split_lines(text: str) -> Iterator[str]:
    """Yield the pieces of a text that ftfy repairs one by one: lines with their breaks, up to a length."""
    start = 0
    while start < len(text):
        end = text.find("\n", start) + 1 or len(text)
        end = min(end, start + _MAX_SEGMENT)
        yield text[start:end]
        start = end


@dataclass(frozen=True, slots=True)
class Punctuation:
    """Replace quotation marks, dashes, dots and spaces by ASCII; remove soft hyphens and zero widths."""

    def start(self) -> RowFunction:
        def work(row: Row) -> Verdict:
            if row.text.isascii():
                return [row]
            return [row.with_values(**{row.key: row.text.translate(_ASCII_PUNCTUATION)})]

        return work


@dataclass(frozen=True, slots=True)
class Whitespace:
    """Replace white space and line breaks by one space: general_cleaning of cleanup_fix_dataset.py."""

    def start(self) -> RowFunction:
        return lambda row: [row.with_values(**{row.key: _WHITESPACE_RUNS.sub(" ", row.text)})]
