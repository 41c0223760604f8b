"""Find the examples of a task whose n-grams are in a training set.

The training set is read once, in chunks; memory holds the n-grams of the task, a chunk, and the longest
document.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from mega_eval.ngram_hash import Hashes, Positions, WordHasher, hash_ngrams, mix_hashes, normalize_text
from mega_schema.dataset.indexed_dataset import IndexedDataset
from mega_schema.tokenizer.tokenizer import Tokenizer

Unit = Literal["word", "token"]
Ids = npt.NDArray[np.int64]
_TABLE_BITS = 24  # of the table that most n-grams of the training set are refused by
_CHUNK_TOKENS = 1 << 17


@dataclass(frozen=True, slots=True)
class TaskText:
    """The texts of one example; no n-gram crosses from one text to the next."""

    id: str
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NgramMatch:
    """An n-gram of an example in a training set.

    Attributes:
        ngram: its words, or its tokens as text.
        train: the training set's prefix.
        document: number of the document in it.
    """

    ngram: str
    train: str
    document: int


@dataclass(slots=True)
class ExampleOverlap:
    """What of an example is in the training sets.

    Attributes:
        ngrams: different n-grams of the example; 0 if it is too short to have one.
        matched: how many of them are in a training set.
        first: the first match, in the order of the training sets.
    """

    id: str
    ngrams: int
    matched: int = 0
    first: NgramMatch | None = None

    @property
    def is_dirty(self) -> bool:
        """Whether any n-gram of the example is in a training set."""
        return self.matched > 0


@dataclass(frozen=True, slots=True)
class TrainingSet:
    """An indexed dataset with the tokenizer that made it."""

    prefix: Path
    dataset: IndexedDataset
    tokenizer: Tokenizer

    @property
    def document_starts(self) -> Positions:
        """First token of each document, and the number of tokens: (documents + 1,)."""
        lengths = np.concatenate([[0], np.cumsum(self.dataset.lengths, dtype=np.int64)])
        starts: Positions = lengths[self.dataset.documents]
        return starts


@dataclass(slots=True)
class _Ngram:
    """An n-gram of the task: its content and the examples that contain it."""

    content: bytes
    examples: list[int] = field(default_factory=list)
    is_matched: bool = False


class NgramIndex:
    """The n-grams of a task's examples, and which of them training sets contain.

    Args:
        examples: the texts of the task.
        length: items of an n-gram.
        unit: whether items are words, or tokens of the training sets' tokenizer.
        tokenizer: of the training sets; needed for tokens.
    """

    def __init__(
        self, examples: Sequence[TaskText], *, length: int, unit: Unit, tokenizer: Tokenizer | None = None
    ) -> None:
        self.length = length
        self.unit = unit
        self._tokenizer = tokenizer
        self._hasher = WordHasher()
        self._ngrams: dict[int, list[_Ngram]] = {}
        self.overlaps = [self._add_example(index, example) for index, example in enumerate(examples)]
        self._hashes = np.sort(np.fromiter(self._ngrams, np.uint64, len(self._ngrams)))
        self._table = np.zeros(1 << _TABLE_BITS, np.bool_)
        self._table[_table_index(self._hashes)] = True

    def scan(self, train: TrainingSet, progress: Callable[[int], object] = lambda tokens: None) -> int:
        """Search a training set for the n-grams.

        Args:
            progress: called with the number of tokens that were read since the last call.

        Returns:
            bytes of the .bin that were read.
        """
        if self.unit == "token":
            self._scan_tokens(train, progress)
        else:
            self._scan_words(train, progress)
        return train.dataset.tokens * train.dataset.dtype.itemsize

    def _add_example(self, index: int, example: TaskText) -> ExampleOverlap:
        seen: set[bytes] = set()
        for text in example.texts:
            for value, content in self._iterate_ngrams(text):
                if content in seen:
                    continue
                seen.add(content)
                bucket = self._ngrams.setdefault(value, [])
                ngram = next((ngram for ngram in bucket if ngram.content == content), None)
                if ngram is None:
                    ngram = _Ngram(content)
                    bucket.append(ngram)
                ngram.examples.append(index)
        return ExampleOverlap(example.id, len(seen))

    def _iterate_ngrams(self, text: str) -> Iterator[tuple[int, bytes]]:
        """Yield hash and content of the n-grams of a text."""
        if self.unit == "token":
            assert self._tokenizer is not None
            ids = np.asarray(self._tokenizer.encode(text), np.int64)
            for start, value in enumerate(_hash_ids(ids, self.length).tolist()):
                yield value, ids[start : start + self.length].tobytes()
            return
        normal = normalize_text(text)
        words, starts, ends = self._hasher.hash_words(normal)
        for first, value in enumerate(hash_ngrams(words, self.length).tolist()):
            yield value, _join_words(normal, starts[first], ends[first + self.length - 1])

    def _find_hits(self, hashes: Hashes) -> Positions:
        """Return the positions of hashes that n-grams of the task have."""
        candidates = np.flatnonzero(self._table[_table_index(hashes)])
        if not len(candidates) or not len(self._hashes):
            return np.zeros(0, np.int64)
        values = hashes[candidates]
        nearest = np.minimum(np.searchsorted(self._hashes, values), len(self._hashes) - 1)
        hits: Positions = candidates[self._hashes[nearest] == values]
        return hits

    def _record_match(self, value: int, content: bytes, train: TrainingSet, document: int) -> None:
        for ngram in self._ngrams[value]:
            if ngram.content != content or ngram.is_matched:
                continue
            ngram.is_matched = True
            for index in ngram.examples:
                overlap = self.overlaps[index]
                overlap.matched += 1
                if overlap.first is None:
                    overlap.first = NgramMatch(self._show(content), str(train.prefix), document)

    def _show(self, content: bytes) -> str:
        if self.unit == "word":
            return content.decode("utf-8", "replace")
        assert self._tokenizer is not None
        return self._tokenizer.decode(np.frombuffer(content, np.int64).tolist())

    def _scan_tokens(self, train: TrainingSet, progress: Callable[[int], object]) -> None:
        starts = train.document_starts
        total = train.dataset.tokens
        for first in range(0, total, _CHUNK_TOKENS):
            last = min(first + _CHUNK_TOKENS, total)
            ids = train.dataset.view_range(first, min(last + self.length - 1, total)).astype(np.int64)
            hashes = _hash_ids(ids, self.length)
            hits = self._find_hits(hashes)
            documents = np.searchsorted(starts, first + hits, "right") - 1
            within = first + hits + self.length <= starts[documents + 1]
            for place, document in zip(hits[within].tolist(), documents[within].tolist(), strict=True):
                content = ids[place : place + self.length].tobytes()
                self._record_match(int(hashes[place]), content, train, document)
            progress(last - first)

    def _scan_words(self, train: TrainingSet, progress: Callable[[int], object]) -> None:
        starts = train.document_starts
        first = 0
        while first < len(starts) - 1:
            # the documents that end within a chunk, or one that is longer
            last = int(np.searchsorted(starts, starts[first] + _CHUNK_TOKENS, "right")) - 1
            last = min(max(last, first + 1), len(starts) - 1)
            texts = [_decode(train, starts[number], starts[number + 1]) for number in range(first, last)]
            self._search_texts([normalize_text(text) for text in texts], train, first)
            progress(int(starts[last] - starts[first]))
            first = last

    def _search_texts(self, texts: Sequence[bytes], train: TrainingSet, first_document: int) -> None:
        joined = b" ".join(texts)
        text_starts = np.cumsum([0, *(len(text) + 1 for text in texts)])
        words, starts, ends = self._hasher.hash_words(joined)
        hashes = hash_ngrams(words, self.length)
        hits = self._find_hits(hashes)
        last_words = hits + self.length - 1
        documents = np.searchsorted(text_starts, starts[hits], "right") - 1
        within = ends[last_words] < text_starts[documents + 1]
        for place, document in zip(hits[within].tolist(), documents[within].tolist(), strict=True):
            content = _join_words(joined, starts[place], ends[place + self.length - 1])
            self._record_match(int(hashes[place]), content, train, first_document + document)


def _join_words(text: bytes, start: int, end: int) -> bytes:
    return b" ".join(text[start:end].split())


def _hash_ids(ids: Ids, length: int) -> Hashes:
    return hash_ngrams(mix_hashes(ids.astype(np.uint64) + np.uint64(1)), length)


def _table_index(hashes: Hashes) -> npt.NDArray[np.int64]:
    return (hashes >> np.uint64(64 - _TABLE_BITS)).astype(np.int64)


def _decode(train: TrainingSet, start: int, end: int) -> str:
    """Return the text of a document, without its end-of-document token."""
    ids = train.dataset.view_range(int(start), int(end))
    if len(ids) and ids[-1] == train.tokenizer.identity.eod:
        ids = ids[:-1]
    return train.tokenizer.decode(ids.tolist())
