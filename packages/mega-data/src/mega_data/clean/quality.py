"""Filter documents by length and by the rules of C4 and Gopher."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mega_data.clean.step import Row, RowFunction, Verdict
from mega_data.readers.versions import FileVersion, file_version
from mega_schema.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# GPT-2's pre-tokenization: a text has at least as many tokens as pieces
_GPT2_PIECES = re.compile(r"'(?:s|t|re|ve|m|ll|d)| ?[^\W\d_]+| ?\d+| ?(?:[^\s\w]|_)+|\s+")
_SENTENCE_ENDS = re.compile(r"[.!?]+(?:\s|$)")
_POLICIES = (
    "terms of use",
    "privacy policy",
    "cookie policy",
    "uses cookies",
    "use of cookies",
    "use cookies",
)
_STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")
_BULLETS = ("•", "‣", "◦", "⁃", "▪", "-", "*")
# words, and the maximum share of characters: of the most frequent n-gram up to 4, of all repeated ones from 5
_NGRAM_LIMITS = (
    (2, 0.2),
    (3, 0.18),
    (4, 0.16),
    (5, 0.15),
    (6, 0.14),
    (7, 0.13),
    (8, 0.12),
    (9, 0.11),
    (10, 0.1),
)
_REPEATED_FROM = 5
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


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
            good_lines = [line.strip() for line in text.split("\n") if self._is_good_line(line.strip())]
            if sum(len(_SENTENCE_ENDS.findall(line.rstrip("\"'”’"))) for line in good_lines) < self.sentences:
                return f"fewer than {self.sentences} sentences in good lines"
            return [row.with_values(**{row.key: "\n".join(good_lines).replace("[citation needed]", "")})]

        return work

    def _is_good_line(self, line: str) -> bool:
        if not line.endswith((".", "!", "?", '"', "”")) or line.endswith(("...", "…")):
            return False
        lower = line.lower()
        if "javascript" in lower or any(policy in lower for policy in _POLICIES):
            return False
        return len(line.split()) >= self.words


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
            words = row.text.split()
            lines = row.text.splitlines()
            if not self.fewest <= len(words) <= self.most:
                return f"not {self.fewest} to {self.most:,} words"
            if words and not 3 <= sum(map(len, words)) / len(words) <= 10:
                return "mean word not of 3 to 10 characters"
            ellipses = row.text.count("...") + row.text.count("…")
            if max(row.text.count("#"), ellipses) > 0.1 * len(words):
                return "more than a hash or ellipsis in ten words"
            if sum(line.lstrip().startswith(_BULLETS) for line in lines) > 0.9 * len(lines):
                return "more than 90% of lines are bullets"
            if sum(line.rstrip().endswith(("...", "…")) for line in lines) > 0.3 * len(lines):
                return "more than 30% of lines end in an ellipsis"
            if sum(any(map(str.isalpha, word)) for word in words) < 0.8 * len(words):
                return "fewer than 80% of words have a letter"
            if len(stops.intersection(word.strip(".,;:!?\"'()").lower() for word in words)) < min(
                2, len(stops)
            ):
                return "fewer than two stop words"
            return [row]

        return work


@dataclass(frozen=True, slots=True)
class GopherRepetition:
    """Drop documents that fail the repetition rules of Gopher's MassiveText (arXiv:2112.11446, table A1)."""

    def start(self) -> RowFunction:
        return lambda row: _repetition_reason(row.text) or [row]


def _repetition_reason(text: str) -> str:
    paragraphs = re.split(r"\n{2,}", text.strip())
    lines = re.split(r"\n+", text.strip())
    for name, parts in (("lines", lines), ("paragraphs", paragraphs)):
        repeated = _repeated_parts(parts)
        if len(repeated) > 0.3 * len(parts):
            return f"more than 30% of {name} are repeated"
        if sum(map(len, repeated)) > 0.2 * len(text):
            return f"more than 20% of characters in repeated {name}"
    return _repeated_ngrams(text)


def _repeated_ngrams(text: str) -> str:
    words = text.split()
    numbers = dict[str, int]()
    word_ids = np.fromiter((numbers.setdefault(word, len(numbers)) for word in words), np.uint64, len(words))
    lengths = np.fromiter(map(len, words), np.int64, len(words))
    before = np.concatenate([[0], np.cumsum(lengths)])
    ngrams = word_ids
    for size, limit in _NGRAM_LIMITS:
        while (width := len(words) - len(ngrams) + 1) < size and len(ngrams) > 1:
            # hash of the n-gram times a large odd number, plus the next word: collisions in 2^64 are rare
            ngrams = (ngrams[:-1] + np.uint64(1)) * _MULTIPLIER + word_ids[width:]
        if len(words) < size:
            return ""
        _, first, inverse, counts = np.unique(
            ngrams, return_index=True, return_inverse=True, return_counts=True
        )
        if size < _REPEATED_FROM:
            top = int(np.argmax(np.where(counts == counts.max(), -first, -len(words))))
            if counts[top] > 1 and counts[top] * (
                before[first[top] + size] - before[first[top]]
            ) > limit * len(text):
                return f"more than {limit:.0%} of characters in one {size}-gram"
            continue
        repeats = np.flatnonzero(first[inverse] != np.arange(len(ngrams)))
        edges = np.zeros(len(words) + 1, np.int64)
        np.add.at(edges, repeats, 1)
        np.add.at(edges, repeats + size, -1)
        if int(lengths[np.cumsum(edges)[:-1] > 0].sum()) > limit * len(text):
            return f"more than {limit:.0%} of characters in repeated {size}-grams"
    return ""


def _repeated_parts(parts: Sequence[str]) -> list[str]:
    """Return the parts that occurred before."""
    seen = set[str]()
    repeated = list[str]()
    for part in parts:
        if part in seen:
            repeated.append(part)
        seen.add(part)
    return repeated


def _bad_word_pattern(path: str) -> re.Pattern[str] | None:
    if not path:
        return None
    if not Path(path).is_file():
        raise ConfigError("step c4: bad_words", "no such file", found=path)
    lines = Path(path).read_text("utf-8").lower().splitlines()
    words = [re.escape(word.strip()) for word in lines if word.strip()]
    return re.compile(rf"(?<!\w)(?:{'|'.join(words)})(?!\w)") if words else None
