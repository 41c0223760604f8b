"""Words of evaluation tasks out of training text: tools/openwebtext/filter_ngrams.py, with its windows.

A task's text gives its 13-grams of words, or itself where it has 8 to 12. Where one of them stands in a
document, it is cut out together with about 200 characters on each side, up to a sentence's end. N-grams that
the corpus has 10 times or more are phrases of the language and stay: so the corpus is counted before it is
cut.
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
_TABLE_BITS, _MULTIPLIER = 24, np.uint64(0x9E3779B97F4A7C15)
_SENTENCE_END = re.compile(r"[.!?]")


@dataclass(frozen=True, slots=True)
class Decontaminate:
    """Cut n-grams of task files out of documents.

    Attributes:
        tasks: JSON lines with the text under text, question, goal, sentence, content, premise or context; or
        plain
            text, a line each.
        longest: words of an n-gram.
        shortest: a shorter task text is passed over.
        phrase: an n-gram seen so often is a phrase, and stays.
        window: characters to cut on each side; a piece left of no more than so many goes too.
        pieces: a document that falls into more goes whole.
        counts: how often the corpus has each n-gram; filled in by the run.
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
        ngrams = self._task_ngrams().excluding(phrases)
        name = "-".join(Path(output_name(Path(task))).stem for task in self.tasks)

        def work(row: Row) -> Verdict:
            if not ngrams.might_contain(row.text):
                return [row]
            pieces = self.split(row.text, ngrams)
            if pieces == [row.text]:
                return [row]
            if len(pieces) > self.pieces:
                return f"falls into more than {self.pieces} pieces"
            if not pieces:
                return "nothing left beside task text"
            old_prefix = f"{row.values['split_id']}-" if "split_id" in row.values else ""
            prefix = f"{old_prefix}{name}-{row.shard:05d}-{row.line:010d}"
            return [
                row.with_values(**{row.key: piece, "split_id": f"{prefix}-{number:04d}"})
                for number, piece in enumerate(pieces)
            ]

        return work

    def count(self, texts: Iterable[str]) -> dict[str, int]:
        """How often each n-gram of the tasks stands in the texts; those that do not are left out."""
        ngrams, counts = self._task_ngrams(), Counter[str]()
        for text in texts:
            if ngrams.might_contain(text):
                counts.update(gram for _, gram in ngrams.find_hits(text))
        return dict(sorted(counts.items()))

    def _task_ngrams(self) -> NgramSet:
        """The n-grams of all tasks; a process makes them once, and again where a file has changed."""
        paths = [Path(task) for task in self.tasks]
        versions = tuple(path.stat().st_mtime_ns if path.is_file() else 0 for path in paths)
        return _task_ngrams(self.tasks, self.longest, self.shortest, versions)

    def task_words(self) -> Iterator[list[str]]:
        """The words of each task text that is long enough."""
        if not self.tasks:
            raise ConfigError("step decontaminate: tasks", "missing", hint='tasks = ["lambada_test.jsonl"]')
        for task in self.tasks:
            for text in _task_texts(Path(task)):
                words = _split_words(text)
                if len(words) >= self.shortest:
                    yield words

    def split(self, text: str, ngrams: NgramSet) -> list[str]:
        """The clean pieces of a text; beyond `pieces` of them the rest is not looked at.

        After each hit the rest of the text begins at a sentence's end. The text is cut into words once.
        """
        ends = [match.start() for match in _SENTENCE_END.finditer(text)]
        pieces, base = list[str](), 0  # where the rest begins, in characters
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
    """The n-grams of task texts, words joined by one space, looked for in other texts.

    A table of hashes of their first words tells at which few places of a text to look; there the strings
    decide.
    """

    def __init__(self, texts: Iterable[Sequence[str]], longest: int) -> None:
        """Those of `longest` words of each text, given as its words; the whole of one that has fewer."""
        self.longest = longest
        self._phrases = frozenset[str]()
        word_lists = [words for words in texts if words]
        self._ngrams = frozenset(chain.from_iterable(_ngrams(words, longest) for words in word_lists))
        sizes = {min(len(words), longest) for words in word_lists}
        self._sizes = sorted(sizes - {longest})
        self._hashed_words = min(sizes, default=longest)  # words that are hashed
        self._table = np.zeros(1 << _TABLE_BITS, bool)
        # each word is hashed once, in whichever n-grams it is; none reaches beyond its text
        lengths = np.fromiter(map(len, word_lists), np.int64, len(word_lists))
        hashes = np.fromiter(map(hash, chain.from_iterable(word_lists)), np.int64, int(lengths.sum()))
        words_left = np.repeat(np.cumsum(lengths), lengths) - np.arange(len(hashes))
        starts = np.flatnonzero(words_left >= np.repeat(np.minimum(lengths, longest), lengths))
        self._table[
            _table_indices(hashes.view(np.uint64)[starts + offset] for offset in range(self._hashed_words))
        ] = True

    def excluding(self, phrases: Iterable[str]) -> NgramSet:
        """The same but for these n-grams; the table is shared."""
        smaller = copy(self)
        smaller._phrases = frozenset(phrases)
        return smaller

    def might_contain(self, text: str) -> bool:
        """False is certain, True is not."""
        words = _split_words(text)
        return len(words) >= self.longest and bool(self._table[self._word_indices(words)].any())

    def find_hits(self, text: str) -> NgramHits:
        """Where n-grams begin in a text."""
        words = _split_words(text)
        return NgramHits(self, text, words, np.flatnonzero(self._table[self._word_indices(words)]).tolist())

    def ngram_at(self, words: Sequence[str], place: int) -> str | None:
        """The n-gram that begins at a word: the longest size, else the shortest there is."""
        is_full_size = place + self.longest <= len(words)
        for size in [self.longest, *self._sizes] if is_full_size else self._sizes:
            ngram = " ".join(words[place : place + size])
            if place + size <= len(words) and ngram in self._ngrams and ngram not in self._phrases:
                return ngram
        return None

    def _word_indices(self, words: Sequence[str]) -> NDArray[np.int64]:
        """Of each so many words that follow each other, a place in the table."""
        hashes = np.fromiter(map(hash, words), np.int64, len(words)).view(np.uint64)
        count = max(0, len(hashes) - self._hashed_words + 1)
        return _table_indices(hashes[offset : offset + count] for offset in range(self._hashed_words))


class NgramHits:
    """The n-grams of one text.

    As in filter_ngrams.py a text of fewer than 13 words has none, and one of 13 none but at its first word.

    Args:
        places: the words where one may begin, ascending.
    """

    def __init__(self, grams: NgramSet, text: str, words: Sequence[str], places: Sequence[int]) -> None:
        self._ngrams, self._words, self._places = grams, words, places
        self._starts = [match.start() for match in _WORD.finditer(text)] if places else []

    def __iter__(self) -> Iterator[tuple[int, str]]:
        """Where each begins, in characters, and which it is."""
        if len(self._words) < self._ngrams.longest:
            return
        only_first = len(self._words) == self._ngrams.longest
        for place in self._places[: 1 if only_first else None]:
            if (
                not (only_first and place)
                and (ngram := self._ngrams.ngram_at(self._words, place)) is not None
            ):
                yield self._starts[place], ngram

    def find(self, start: int) -> tuple[int, str] | None:
        """The first in the rest of the text from character `start` on, as if the rest were the text."""
        first = bisect_left(self._starts, start)
        words_left = len(self._words) - first
        if words_left < self._ngrams.longest:
            return None
        for index in range(bisect_left(self._places, first), len(self._places)):
            place = self._places[index]
            if words_left == self._ngrams.longest and place > first:
                return None
            if (ngram := self._ngrams.ngram_at(self._words, place)) is not None:
                return self._starts[place], ngram
        return None


@lru_cache(maxsize=1)
def _task_ngrams(tasks: tuple[str, ...], longest: int, shortest: int, versions: tuple[int, ...]) -> NgramSet:
    """The n-grams of the tasks; other `versions` of their files are another key."""
    return NgramSet(Decontaminate(tasks, longest, shortest).task_words(), longest)


def _ngrams(words: Sequence[str], longest: int) -> Iterator[str]:
    """Each run of `longest` words of a text, or all of its words where they are fewer."""
    text, size = " ".join(words), min(len(words), longest)
    ends = list(accumulate((len(word) + 1 for word in words), initial=0))  # one beyond the space after a word
    return (text[first : end - 1] for first, end in zip(ends, ends[size:], strict=False))


def _table_indices(columns: Iterable[NDArray[np.uint64]]) -> NDArray[np.int64]:
    """Places in the table of runs of words, given the hashes of their first words, their second and so on."""
    hashes = np.zeros(1, np.uint64)
    for column in columns:
        hashes = hashes * _MULTIPLIER + column
    return (hashes * _MULTIPLIER >> np.uint64(64 - _TABLE_BITS)).astype(np.int64)


def _split_words(text: str) -> list[str]:
    # a capital letter may be several characters in lower case, which are no word: so words first
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
