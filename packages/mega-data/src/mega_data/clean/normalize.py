"""Steps that repair a text and keep the document."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

from mega_data.clean.step import Row, RowFunction, Verdict, import_for_step

# every character that ftfy.fix_text changes, except those of wrong encodings, which `badness` detects:
# entities and escapes, controls, ligatures, curly quotes, line breaks, full width, surrogates
_FTFY_CHARACTERS = re.compile(
    "[&\r\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u0132\u0133\u0149\u01c4-\u01cc\u01f1-\u01f3\u02bc\u2018-\u201f"
    "\u2028\u2029\u206a-\u206f\u3000\ufb00-\ufb06\ufeff\uff01-\uffef\ufff9-\ufffc\ud800-\udfff]"
)
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


def might_change(text: str) -> bool:
    """Return False if ftfy certainly does not change the text. Much faster than ftfy."""
    if _FTFY_CHARACTERS.search(text):
        return True
    if text.isascii():
        return False
    badness = import_for_step("fix-text", "ftfy.badness")
    return not unicodedata.is_normalized("NFC", text) or bool(badness.is_bad(text))


@dataclass(frozen=True, slots=True)
class FixText:
    """Repair wrong encodings, entities and stray control characters with ftfy."""

    def start(self) -> RowFunction:
        ftfy = import_for_step("fix-text", "ftfy")

        def work(row: Row) -> Verdict:
            return (
                [row.with_values(**{row.key: ftfy.fix_text(row.text)})] if might_change(row.text) else [row]
            )

        return work


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
