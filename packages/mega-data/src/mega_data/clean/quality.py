"""Filter documents by length and by the rules of C4 and Gopher."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mega_data.clean.step import Row, RowFunction, Verdict
from mega_data.clean.words import WordTable, word_table
from mega_data.readers.versions import FileVersion, file_version
from mega_schema.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# GPT-2's pre-tokenization: a text has at least as many tokens as pieces
_GPT2_PIECES = re.compile(r"'(?:s|t|re|ve|m|ll|d)| ?[^\W\d_]+| ?\d+| ?(?:[^\s\w]|_)+|\s+")
_SENTENCE_ENDS = re.compile(r"[.!?]+(?:\s|$)")
_NOTICES = (
    "javascript",
    "terms of use",
    "privacy policy",
    "cookie policy",
    "uses cookies",
    "use of cookies",
    "use cookies",
)
_STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")
_BULLETS = ("•", "‣", "◦", "⁃", "▪", "-", "*")


@dataclass(frozen=True, slots=True)
class LengthFilter:
    """Keep texts with a number of characters in a range."""

    minimum: int = 0
    maximum: int = 0  # 0 is no limit

    def start(self) -> RowFunction:
        def work(row: Row) -> Verdict:
            if len(row.text) < self.minimum:
                return f"shorter than {self.minimum:,} characters"
            if self.maximum and len(row.text) > self.maximum:
                return f"longer than {self.maximum:,} characters"
            return [row]

        return work


@dataclass(frozen=True, slots=True)
class TokenCountFilter:
    """Keep texts with a minimum number of tokens: the 128 of openwebtext's cleanup_dataset.py.

    As there, a text of 8 characters or more per token is kept without counting.

    Attributes:
        tokenizer: a tokenizer.json; empty counts the pieces of GPT-2's pre-tokenization, a lower bound.
    """

    minimum: int = 128
    tokenizer: str = ""

    def start(self) -> RowFunction:
        tokenizer = None
        if self.tokenizer:
            if not Path(self.tokenizer).is_file():
                raise ConfigError("step tokens: tokenizer", "no such file", found=self.tokenizer)
            tokenizer = _load_tokenizer(self.tokenizer, file_version(Path(self.tokenizer)))

        def work(row: Row) -> Verdict:
            text = row.text
            if len(text) >= 8 * self.minimum:
                return [row]
            count = len(tokenizer.encode(text).ids) if tokenizer else len(_GPT2_PIECES.findall(text))
            return [row] if count >= self.minimum else f"fewer than {self.minimum} tokens"

        return work


@lru_cache(maxsize=1)
def _load_tokenizer(path: str, version: FileVersion) -> Tokenizer:
    from tokenizers import Tokenizer as Library

    return Library.from_file(path)


@dataclass(frozen=True, slots=True)
class JavascriptFilter:
    """Drop short texts that mention JavaScript: cleanup_fix_dataset.py's remove_256_javascript."""

    shorter_than: int = 256

    def start(self) -> RowFunction:
        def work(row: Row) -> Verdict:
            short = len(row.text) < self.shorter_than
            return "short, with javascript" if short and "javascript" in row.text.lower() else [row]

        return work


@dataclass(frozen=True, slots=True)
class C4Filter:
    """Keep the lines and pages that C4 keeps (arXiv:1910.10683, section 2.2).

    Lines end a sentence, have 5 words or more and mention neither JavaScript nor cookie policies. Pages have
    3 sentences or more and neither "lorem ipsum" nor braces nor a word of the optional list.

    Attributes:
        bad_words: a file with one word or phrase per line.
    """

    words: int = 5
    sentences: int = 3
    bad_words: str = ""

    def start(self) -> RowFunction:
        bad = _bad_word_pattern(self.bad_words)

        def work(row: Row) -> Verdict:
            text = row.text
            lower = text.lower()
            if "lorem ipsum" in lower:
                return "lorem ipsum"
            if "{" in text:
                return "a brace"
            if bad and bad.search(lower):
                return "a word of the list"
            # few texts mention any of them, so that most lines are not searched
            has_notice = any(notice in lower for notice in _NOTICES)
            lines = (line.strip() for line in text.split("\n"))
            good_lines = [line for line in lines if self._is_good_line(line, has_notice=has_notice)]
            if sum(len(_SENTENCE_ENDS.findall(line.rstrip("\"'”’"))) for line in good_lines) < self.sentences:
                return f"fewer than {self.sentences} sentences in good lines"
            return [row.with_values(**{row.key: "\n".join(good_lines).replace("[citation needed]", "")})]

        return work

    def _is_good_line(self, line: str, *, has_notice: bool) -> bool:
        if not line.endswith((".", "!", "?", '"', "”")) or line.endswith(("...", "…")):
            return False
        if has_notice and any(notice in line.lower() for notice in _NOTICES):
            return False
        return len(line.split(None, max(0, self.words - 1))) >= self.words


@dataclass(frozen=True, slots=True)
class GopherQuality:
    """Drop documents that fail the quality rules of Gopher's MassiveText (arXiv:2112.11446, appendix A.1.1).

    Attributes:
        stop_words: the text needs two different ones; set them for languages other than English.
    """

    fewest: int = 50  # words
    most: int = 100_000
    stop_words: tuple[str, ...] = _STOP_WORDS

    def start(self) -> RowFunction:
        stops = frozenset(self.stop_words)

        def work(row: Row) -> Verdict:
            text = row.text
            table = word_table(text)
            words = len(table)
            if not self.fewest <= words <= self.most:
                return f"not {self.fewest} to {self.most:,} words"
            if words and not 3 <= int(table.lengths.sum()) / words <= 10:
                return "mean word not of 3 to 10 characters"
            ellipses = text.count("...") + text.count("…")
            if max(text.count("#"), ellipses) > 0.1 * words:
                return "more than a hash or ellipsis in ten words"
            if reason := _line_reason(text, ellipses):
                return reason
            if not _have_letters(table, 0.8):
                return "fewer than 80% of words have a letter"
            if not _has_stop_words(table.distinct, stops, min(2, len(stops))):
                return "fewer than two stop words"
            return [row]

        return work


def _line_reason(text: str, ellipses: int) -> str:
    """Return the reason to drop a text with these lines, or "".

    Args:
        ellipses: ellipses in the text; as many lines can end in one.
    """
    lines = text.splitlines()
    bullets = sum(map(text.count, _BULLETS))
    if bullets > 0.9 * len(lines) and (
        sum(line.lstrip().startswith(_BULLETS) for line in lines) > 0.9 * len(lines)
    ):
        return "more than 90% of lines are bullets"
    if ellipses > 0.3 * len(lines) and (
        sum(line.rstrip().endswith(("...", "…")) for line in lines) > 0.3 * len(lines)
    ):
        return "more than 30% of lines end in an ellipsis"
    return ""


def _have_letters(table: WordTable, share: float) -> bool:
    """Return whether this share of the words contains a letter."""
    flags = table.has_ascii_letter
    if flags is not None and int(table.counts[flags].sum()) >= share * len(table):
        return True
    # most words consist of letters, which is several times faster to ask than whether one is a letter
    for has_letter in (str.isalpha, _has_letter):
        is_counted = np.fromiter(map(has_letter, table.distinct), bool, count=len(table.distinct))
        if int(table.counts[is_counted].sum()) >= share * len(table):
            return True
    return False


def _has_letter(word: str) -> bool:
    return word[0].isalpha() or any(map(str.isalpha, word))


def _has_stop_words(words: Iterable[str], stops: Collection[str], fewest: int) -> bool:
    """Return whether the words contain at least `fewest` different stop words; stop when they do."""
    missing = set(stops)
    for word in words:
        if len(stops) - len(missing) >= fewest:
            return True
        missing.discard(word.strip(".,;:!?\"'()").lower())
    return len(stops) - len(missing) >= fewest


def _bad_word_pattern(path: str) -> re.Pattern[str] | None:
    if not path:
        return None
    if not Path(path).is_file():
        raise ConfigError("step c4: bad_words", "no such file", found=path)
    lines = Path(path).read_text("utf-8").lower().splitlines()
    words = [re.escape(word.strip()) for word in lines if word.strip()]
    return re.compile(rf"(?<!\w)(?:{'|'.join(words)})(?!\w)") if words else None
