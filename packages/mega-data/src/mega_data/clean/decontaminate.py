"""Remove n-grams of evaluation tasks from training text, as Megatron's tools/openwebtext/filter_ngrams.py.

A task's text yields its 13-grams of words, or the whole text if it has 8 to 12 words. An n-gram in a document
is cut out together with about 200 characters on each side, up to the end of a sentence. N-grams that occur 10
times or more in the corpus are common phrases and are kept, so n-grams are counted in the corpus first.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, chain
from pathlib import Path

import numpy as np
import orjson
from numpy.typing import NDArray

from mega_data.clean.step import Row, RowFunction, Verdict
from mega_data.jsonl_shards import output_name, read_lines
from mega_schema.errors import ConfigError, FormatError

_WORD = re.compile(r"\w+")
_TEXT_KEYS = ("text", "question", "goal", "sentence", "content", "premise", "context")
_TABLE_BITS = 24
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_SENTENCE_END = re.compile(r"[.!?]")


@dataclass(frozen=True, slots=True)
class Decontaminate:
    """Cut n-grams of task files out of documents.

    Attributes:
        tasks: JSON lines with the text under text, question, goal, sentence, content, premise or context; or
            plain text, one per line.
        longest: words of an n-gram.
        shortest: skip task texts with fewer words.
        phrase: keep n-grams with this many occurrences or more in the corpus.
        window: characters to cut on each side; drop remaining pieces of at most this many characters.
        pieces: drop documents that split into more pieces.
        counts: occurrences of each n-gram in the corpus; set by the run.
    """

    tasks: tuple[str, ...] = ()
    longest: int = 13
    shortest: int = 8
    phrase: int = 10
    window: int = 200
    pieces: int = 10
    counts: Mapping[str, int] = field(default_factory=dict)

    def start(self) -> RowFunction:
        phrases = (gram for gram, count in self.counts.items() if count >= self.phrase)
        ngrams = self._task_ngrams().without_phrases(phrases)
        name = "-".join(Path(output_name(Path(task))).stem for task in self.tasks)

        def work(row: Row) -> Verdict:
            if not ngrams.might_contain(row.text):
                return [row]
            pieces = self.split(row.text, ngrams)
            if pieces == [row.text]:
                return [row]
            if len(pieces) > self.pieces:
                return f"splits into more than {self.pieces} pieces"
            if not pieces:
                return "nothing left besides task text"
            old_prefix = f"{row.values['split_id']}-" if "split_id" in row.values else ""
            prefix = f"{old_prefix}{name}-{row.shard:05d}-{row.line:010d}"
            return [
                row.with_values(**{row.key: piece, "split_id": f"{prefix}-{number:04d}"})
                for number, piece in enumerate(pieces)
            ]

        return work

    def count(self, texts: Iterable[str]) -> dict[str, int]:
        """Count the occurrences of each n-gram of the tasks in the texts; omit those without one."""
        ngrams = self._task_ngrams()
        counts = Counter[str]()
        for text in texts:
            if ngrams.might_contain(text):
                counts.update(ngram for _, ngram in ngrams.find_hits(text))
        return dict(sorted(counts.items()))

    def _task_ngrams(self) -> NgramSet:
        """Return the n-grams of all tasks; cached in the process until a file changes."""
        paths = [Path(task) for task in self.tasks]
        versions = tuple(path.stat().st_mtime_ns if path.is_file() else 0 for path in paths)
        return _task_ngrams(self.tasks, self.longest, self.shortest, versions)

    def task_words(self) -> Iterator[list[str]]:
        """Yield the words of each task text that is long enough."""
        if not self.tasks:
            raise ConfigError("step decontaminate: tasks", "missing", hint='tasks = ["lambada_test.jsonl"]')
        for task in self.tasks:
            for text in _task_texts(Path(task)):
                words = _split_words(text)
                if len(words) >= self.shortest:
                    yield words

    def split(self, text: str, ngrams: NgramSet) -> list[str]:
        """Return the clean pieces of a text; stop after `pieces` of them.

        After each hit the search continues at the end of a sentence. The text is split into words once.
        """
        ends = [match.start() for match in _SENTENCE_END.finditer(text)]
        pieces = list[str]()
        base = 0  # character offset of the remaining text
        hits = ngrams.find_hits(text)
        while len(pieces) <= self.pieces and (hit := hits.find(base)) is not None:
            start, ngram = hit
            last = bisect_left(ends, start - self.window + 1) - 1
            piece = text[base : ends[last] + 1] if last >= 0 and ends[last] > base else ""
            if len(piece) > self.window:
                pieces.append(piece)
            end = bisect_left(ends, start + len(ngram) + self.window)
            base = ends[end] + 1 if end < len(ends) else len(text)
            if len(text) - base <= self.window:
                return pieces
        return [*pieces, text[base:]]


class NgramSet:
    """The n-grams of task texts, words joined by one space, for a search in other texts.

    A table of hashes of their first words selects the few places of a text at which the strings are compared.
    """

    def __init__(self, texts: Iterable[Sequence[str]], longest: int) -> None:
        """Collect the n-grams of `longest` words of each text; a shorter text is one n-gram."""
        self.longest = longest
        self._phrases = frozenset[str]()
        word_lists = [words for words in texts if words]
        self._ngrams = frozenset(chain.from_iterable(_ngrams(words, longest) for words in word_lists))
        sizes = {min(len(words), longest) for words in word_lists}
        self._sizes = sorted(sizes - {longest})
        self._hashed_words = min(sizes, default=longest)
        self._table = np.zeros(1 << _TABLE_BITS, bool)
        # each word is hashed once, however many n-grams it is in; no n-gram crosses the end of its text
        lengths = np.fromiter(map(len, word_lists), np.int64, len(word_lists))
        hashes = np.fromiter(map(hash, chain.from_iterable(word_lists)), np.int64, int(lengths.sum()))
        words_left = np.repeat(np.cumsum(lengths), lengths) - np.arange(len(hashes))
        starts = np.flatnonzero(words_left >= np.repeat(np.minimum(lengths, longest), lengths))
        self._table[
            _table_indices(hashes.view(np.uint64)[starts + offset] for offset in range(self._hashed_words))
        ] = True

    def without_phrases(self, phrases: Iterable[str]) -> NgramSet:
        """Return a copy without these n-grams; the table is shared."""
        smaller = copy(self)
        smaller._phrases = frozenset(phrases)
        return smaller

    def might_contain(self, text: str) -> bool:
        """Return False if the text certainly contains no n-gram of the set."""
        words = _split_words(text)
        return len(words) >= self.longest and bool(self._table[self._word_indices(words)].any())

    def find_hits(self, text: str) -> NgramHits:
        """Find the positions of n-grams in a text."""
        words = _split_words(text)
        return NgramHits(self, text, words, np.flatnonzero(self._table[self._word_indices(words)]).tolist())

    def ngram_at(self, words: Sequence[str], place: int) -> str | None:
        """Return the n-gram that begins at a word: the longest size, else the shortest that matches."""
        is_full_size = place + self.longest <= len(words)
        for size in [self.longest, *self._sizes] if is_full_size else self._sizes:
            ngram = " ".join(words[place : place + size])
            if place + size <= len(words) and ngram in self._ngrams and ngram not in self._phrases:
                return ngram
        return None

    def _word_indices(self, words: Sequence[str]) -> NDArray[np.int64]:
        """Return the table index of each run of consecutive words."""
        hashes = np.fromiter(map(hash, words), np.int64, len(words)).view(np.uint64)
        count = max(0, len(hashes) - self._hashed_words + 1)
        return _table_indices(hashes[offset : offset + count] for offset in range(self._hashed_words))


class NgramHits:
    """The n-grams of one text.

    As in filter_ngrams.py, a text of fewer than 13 words has none, and a text of 13 words only at its first
    word.

    Args:
        places: indices of the words at which an n-gram may begin, ascending.
    """

    def __init__(self, ngrams: NgramSet, text: str, words: Sequence[str], places: Sequence[int]) -> None:
        self._ngram_set = ngrams
        self._words = words
        self._places = places
        self._starts = [match.start() for match in _WORD.finditer(text)] if places else []

    def __iter__(self) -> Iterator[tuple[int, str]]:
        """Yield the character offset of each n-gram and the n-gram."""
        if len(self._words) < self._ngram_set.longest:
            return
        only_first = len(self._words) == self._ngram_set.longest
        for place in self._places[: 1 if only_first else None]:
            if (
                not (only_first and place)
                and (ngram := self._ngram_set.ngram_at(self._words, place)) is not None
            ):
                yield self._starts[place], ngram

    def find(self, start: int) -> tuple[int, str] | None:
        """Find the first n-gram from character `start` on, as if the text began there."""
        first = bisect_left(self._starts, start)
        words_left = len(self._words) - first
        if words_left < self._ngram_set.longest:
            return None
        for index in range(bisect_left(self._places, first), len(self._places)):
            place = self._places[index]
            if words_left == self._ngram_set.longest and place > first:
                return None
            if (ngram := self._ngram_set.ngram_at(self._words, place)) is not None:
                return self._starts[place], ngram
        return None


@lru_cache(maxsize=1)
def _task_ngrams(tasks: tuple[str, ...], longest: int, shortest: int, versions: tuple[int, ...]) -> NgramSet:
    """Build the n-grams of the tasks; `versions` of their files are part of the cache key."""
    return NgramSet(Decontaminate(tasks, longest, shortest).task_words(), longest)


def _ngrams(words: Sequence[str], longest: int) -> Iterator[str]:
    """Yield each run of `longest` words of a text, or all of its words if there are fewer."""
    text = " ".join(words)
    size = min(len(words), longest)
    ends = list(accumulate((len(word) + 1 for word in words), initial=0))  # offset after each space
    return (text[first : end - 1] for first, end in zip(ends, ends[size:], strict=False))


def _table_indices(columns: Iterable[NDArray[np.uint64]]) -> NDArray[np.int64]:
    """Map runs of words to table indices, given the hashes of their first words, second words and so on."""
    hashes = np.zeros(1, np.uint64)
    for column in columns:
        hashes = hashes * _MULTIPLIER + column
    return (hashes * _MULTIPLIER >> np.uint64(64 - _TABLE_BITS)).astype(np.int64)


def _split_words(text: str) -> list[str]:
    # lower case may add characters that are not part of a word, so split first
    if text.isascii():
        return _WORD.findall(text.lower())
    return [word.lower() for word in _WORD.findall(text)]


def _task_texts(task: Path) -> Iterator[str]:
    if not task.is_file():
        raise ConfigError("step decontaminate: tasks", "no such file", found=task)
    for number, line in enumerate(read_lines(task), 1):
        if not line.strip():
            continue
        if not output_name(task).endswith((".jsonl", ".json")):
            yield line.decode("utf-8", "replace")
            continue
        try:
            values = orjson.loads(line)
            yield next(values[key] for key in _TEXT_KEYS if isinstance(values.get(key), str))
        except (orjson.JSONDecodeError, AttributeError, StopIteration):
            wanted = f"an object with a string under {' or '.join(_TEXT_KEYS)}"
            raise FormatError(f"{task}:{number}", "not a task's line", wanted=wanted) from None
