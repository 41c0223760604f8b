"""Train n-gram models with modified Kneser-Ney smoothing, as KenLM's lmplz, and write them in ARPA format.

Heafield et al. 2013, "Scalable Modified Kneser-Ney Language Model Estimation"; equations of Chen and Goodman
1998, section 3. With c(w) the adjusted count of an n-gram (its count for the highest order and after <s>,
else the number of different words before it), D the discount of its count and order, and h its context:

    P(w | h) = (c(hw) - D(c(hw))) / sum of c(hx) + gamma(h) P(w | h without its first word)

The lowest order is interpolated with 1 / (words without <s>). Pruned n-grams give their counts to gamma.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray

from mega_data.clean.ngram_model import BEGIN, END, UNKNOWN
from mega_data.clean.ngram_options import FALLBACK, NgramOptions
from mega_data.output_formats import open_output
from mega_schema.errors import ConfigError

Numbers = NDArray[np.int64]
Words = NDArray[np.uint32]
Floats = NDArray[np.float64]
_UNKNOWN, _BEGIN, _END = range(3)  # numbers of <unk>, <s> and </s>
_BLOCK_WORDS: Final = 1 << 21
_WRITTEN_ROWS: Final = 1 << 16
_LEAST: Final = 1e-99  # of a backoff weight
_MEMORY_FACTOR: Final = 10  # of the whole training, over the counted n-grams; measured


@dataclass(frozen=True, slots=True)
class NgramCounts:
    """The different n-grams of a corpus, each sentence of which has order - 1 <s> before it.

    Attributes:
        ngrams: (n-grams, order); sorted by the last word, then by the one before it, and so on.
        counts: (n-grams,) of each in the corpus.
    """

    ngrams: Words
    counts: Numbers

    @property
    def size(self) -> int:
        return self.ngrams.nbytes + self.counts.nbytes


@dataclass(frozen=True, slots=True)
class _Level:
    """The n-grams of one order, also those with several <s>, in the order of `NgramCounts`.

    Attributes:
        ngrams: (n-grams, n).
        counts: in the corpus.
        adjusted: adjusted counts.
        suffixes: row of the last n - 1 words in the level below.
    """

    ngrams: Words
    counts: Numbers
    adjusted: Numbers
    suffixes: Numbers

    @property
    def is_valid(self) -> NDArray[np.bool_]:
        """Whether each n-gram has at most one <s>."""
        if self.ngrams.shape[1] == 1:
            return np.ones(len(self.ngrams), np.bool_)
        is_begin: NDArray[np.bool_] = self.ngrams[:, 1] == _BEGIN
        return ~is_begin


@dataclass(frozen=True, slots=True)
class TrainedNgrams:
    """The n-grams of one order in the model.

    Attributes:
        ngrams: (n-grams, n).
        log10: of the probability.
        backoffs: log10 of the weight.
    """

    ngrams: Words
    log10: Floats
    backoffs: Floats


@dataclass(frozen=True, slots=True)
class TrainingReport:
    """What a model was trained on, and what it has.

    Attributes:
        sentences, words: read; words without <s> and </s>.
        skipped: words of the text that are <s>, </s> or <unk>.
        ngrams: in the model, by order.
    """

    sentences: int
    words: int
    skipped: int
    ngrams: tuple[int, ...]


def train_ngram(sentences: Iterable[Sequence[bytes]], options: NgramOptions, output: Path) -> TrainingReport:
    """Train a model on sentences and write it; a name that ends in .gz is compressed.

    Words of the text that are <s>, </s> or <unk> are skipped.

    Raises:
        ConfigError: there is no sentence, the text is too small or artificial for discounts, or there are
            more n-grams than `options.max_bytes`.
    """
    options.check()
    reader = _SentenceReader(options.order)
    counts = _NgramCounter(options.max_bytes)
    for block in reader.blocks(sentences):
        counts.add(block)
    if not reader.sentences:
        raise ConfigError("--input", "contains no text", wanted="one line or more")
    levels = list(_estimate(counts.finish(), len(reader.vocabulary), options))
    sizes = tuple(len(level.ngrams) for level in levels)
    with open_output(output) as out:
        write_arpa(out, list(reader.vocabulary), levels)
    return TrainingReport(reader.sentences, reader.words, reader.skipped, sizes)


class _SentenceReader:
    """Numbers the words of sentences."""

    def __init__(self, order: int) -> None:
        self.vocabulary = {UNKNOWN: _UNKNOWN, BEGIN: _BEGIN, END: _END}
        self.sentences = self.words = self.skipped = 0
        self._order = order

    def blocks(self, sentences: Iterable[Sequence[bytes]]) -> Iterator[Words]:
        """Yield n-grams (n-grams, order), one that ends with each word and each end of a sentence."""
        padding = [_BEGIN] * (self._order - 1)
        numbers = list[int]()
        for sentence in sentences:
            numbers += padding
            numbers += self._number(sentence)
            numbers.append(_END)
            self.sentences += 1
            if len(numbers) >= _BLOCK_WORDS:
                yield self._windows(numbers)
                numbers = []
        if numbers:
            yield self._windows(numbers)

    def _number(self, sentence: Sequence[bytes]) -> list[int]:
        vocabulary = self.vocabulary
        numbers = [vocabulary.setdefault(word, len(vocabulary)) for word in sentence]
        if numbers and min(numbers) <= _END:
            kept_numbers = [number for number in numbers if number > _END]
            self.skipped += len(numbers) - len(kept_numbers)
            numbers = kept_numbers
        self.words += len(numbers)
        return numbers

    def _windows(self, numbers: Sequence[int]) -> Words:
        windows = np.lib.stride_tricks.sliding_window_view(np.array(numbers, np.uint32), self._order)
        ngrams: Words = windows[windows[:, -1] != _BEGIN]  # <s> is the last word of no n-gram
        return ngrams


class _NgramCounter:
    """Counts n-grams: sorted parts, of which each is more than twice as large as the next."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._parts = list[NgramCounts]()

    def add(self, ngrams: Words) -> None:
        """Count the rows of an array.

        Raises:
            ConfigError: the n-grams exceed the memory.
        """
        self._parts.append(_count_rows(ngrams, np.ones(len(ngrams), np.int64)))
        while len(self._parts) > 1 and self._parts[-2].size < 2 * self._parts[-1].size:
            self._merge(2)
        size = _MEMORY_FACTOR * sum(part.size for part in self._parts)
        if size > self._max_bytes:
            raise ConfigError(
                "--memory",
                "too small for the n-grams of the text",
                found=f"{self._max_bytes >> 20} MiB",
                hint=f"--memory {-(-2 * size >> 20)}, fewer documents by --max-documents, or a lower --order",
            )

    def finish(self) -> NgramCounts:
        self._merge(len(self._parts))
        return self._parts[0]

    def _merge(self, number: int) -> None:
        parts = self._parts[-number:]
        self._parts[-number:] = [
            _count_rows(
                np.concatenate([part.ngrams for part in parts]),
                np.concatenate([part.counts for part in parts]),
            )
        ]


def _count_rows(ngrams: Words, counts: Numbers) -> NgramCounts:
    """Sort n-grams as in `NgramCounts`, and add up the counts of equal ones."""
    # pairs of words are sorted as one number, from the first words to the last
    columns = [ngrams[:, number].astype(np.uint64) for number in range(ngrams.shape[1])]
    if len(columns) % 2:
        columns.insert(0, np.zeros_like(columns[0]))
    pairs = zip(columns[::2], columns[1::2], strict=True)
    order = np.lexsort([late << np.uint64(32) | early for early, late in pairs])
    ngrams = ngrams[order]
    starts = np.flatnonzero(np.concatenate([[True], np.any(ngrams[1:] != ngrams[:-1], axis=1)]))
    return NgramCounts(ngrams[starts], np.add.reduceat(counts[order], starts))


def _make_levels(total: NgramCounts) -> list[_Level]:
    """Return the n-grams of every order with their adjusted counts, from the lowest order to the highest."""
    ngrams, counts, adjusted = total.ngrams, total.counts, total.counts
    levels = list[_Level]()
    while ngrams.shape[1] > 1:
        shorter = ngrams[:, 1:]
        is_first = np.concatenate([[True], np.any(shorter[1:] != shorter[:-1], axis=1)])
        starts = np.flatnonzero(is_first)
        levels.insert(0, _Level(ngrams, counts, adjusted, np.cumsum(is_first) - 1))
        # sorted by the last words, the longer n-grams of a shorter one are consecutive
        words_before = np.diff(np.append(starts, len(ngrams)))
        counts = np.add.reduceat(counts, starts)
        ngrams = shorter[starts]
        adjusted = np.where(ngrams[:, 0] == _BEGIN, counts, words_before)
    levels.insert(0, _Level(ngrams, counts, adjusted, np.zeros(len(ngrams), np.int64)))
    return levels


def _estimate(total: NgramCounts, words: int, options: NgramOptions) -> Iterator[TrainedNgrams]:
    """Yield the n-grams of every order with their probabilities and backoff weights."""
    levels = _with_all_words(_make_levels(total), words)
    lookup = _RowLookup(levels)
    uniform = np.array([1 / (words - 1)])  # of all words but <s>
    lower = uniform  # probabilities of the level below
    rows = list[tuple[Words, Floats, NDArray[np.bool_]]]()
    backoffs = list[Floats]()
    for size, level in enumerate(levels, 1):
        is_valid = level.is_valid
        is_pruned = is_valid & (level.counts <= options.threshold(size)) if size > 1 else ~is_valid
        discount = _discounts(level.adjusted[is_valid], size, options)
        context = lookup.contexts(size, level.ngrams)
        places = len(levels[size - 2].ngrams) if size > 1 else 1
        discounts = discount[np.minimum(level.adjusted, 3)]
        total_counts = np.bincount(context, is_valid * level.adjusted, places)
        unused = np.bincount(context, is_valid * np.where(is_pruned, level.adjusted, discounts), places)
        with np.errstate(divide="ignore", invalid="ignore"):
            gamma = np.where(total_counts > 0, unused / total_counts, 1.0)
            own = np.where(is_valid, (level.adjusted - discounts) / total_counts[context], 0.0)
        probability = own + gamma[context] * lower[level.suffixes]
        if size > 1:
            backoffs.append(np.log10(np.maximum(gamma, _LEAST)))
        rows.append((level.ngrams, probability, is_valid & ~is_pruned))
        lower = probability
    backoffs.append(np.zeros(len(levels[-1].ngrams)))
    for (ngrams, probability, is_written), weights in zip(rows, backoffs, strict=True):
        if ngrams.shape[1] == 1:  # <s> is never predicted; lmplz writes log10 0
            probability = np.where(ngrams[:, 0] == _BEGIN, 1.0, probability)
        yield TrainedNgrams(ngrams[is_written], np.log10(probability[is_written]), weights[is_written])


def _with_all_words(levels: list[_Level], words: int) -> list[_Level]:
    """Add <unk>, and <s>, which ends no n-gram, to the unigrams, so that a word's number is its row."""
    lowest = levels[0]
    rows = lowest.ngrams[:, 0]
    counts, adjusted = np.zeros((2, words), np.int64)
    counts[rows], adjusted[rows] = lowest.counts, lowest.adjusted
    ngrams = np.arange(words, dtype=np.uint32)[:, None]
    levels[0] = _Level(ngrams, counts, adjusted, np.zeros(words, np.int64))
    if len(levels) > 1:
        above = levels[1]
        suffixes = above.ngrams[:, 1].astype(np.int64)
        levels[1] = _Level(above.ngrams, above.counts, above.adjusted, suffixes)
    return levels


class _RowLookup:
    """Finds rows of n-grams: of one word by its number, of more by the row of the rest and the first word."""

    def __init__(self, levels: Sequence[_Level]) -> None:
        self._stride = len(levels[0].ngrams)
        self._keys = [self._make_keys(level.suffixes, level.ngrams[:, 0]) for level in levels]

    def contexts(self, size: int, ngrams: Words) -> Numbers:
        """Return the row, one level below, of the first `size` - 1 words of n-grams; for `size` 1 zeros.

        The row of a context with several <s> may be that of another n-gram.
        """
        if size == 1:
            return np.zeros(len(ngrams), np.int64)
        rows = ngrams[:, size - 2].astype(np.int64)
        for column in range(size - 3, -1, -1):
            keys = self._keys[size - 2 - column]
            wanted = self._make_keys(rows, ngrams[:, column])
            rows = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        return rows

    def _make_keys(self, suffixes: Numbers, words: Words) -> Numbers:
        return suffixes * self._stride + words


def _discounts(adjusted: Numbers, size: int, options: NgramOptions) -> Floats:
    """Return the discounts of counts of 0, 1, 2, and 3 or more (Chen and Goodman 1998, equation 26).

    Raises:
        ConfigError: they cannot be computed, and `options.fallback` is off.
    """
    numbers = np.bincount(np.minimum(adjusted, 5), minlength=6)[1:5].tolist()
    if all(numbers[:3]):
        ratio = numbers[0] / (numbers[0] + 2 * numbers[1])
        values = [j - (j + 1) * ratio * numbers[j] / numbers[j - 1] for j in (1, 2, 3)]
        if all(0 <= value <= j for j, value in enumerate(values, 1)):
            return np.array([0.0, *values])
    if options.fallback:
        return np.array([0.0, *FALLBACK])
    raise ConfigError(
        "--input",
        f"no Kneser-Ney discounts for {size}-grams: a small or artificial text",
        found=f"{', '.join(map(str, numbers))} n-grams with an adjusted count of 1, 2, 3, 4",
        hint=f"more text, or --discount-fallback, which takes {', '.join(map(str, FALLBACK))}",
    )


def write_arpa(out: IO[bytes], words: Sequence[bytes], levels: Sequence[TrainedNgrams]) -> None:
    """Write a model in ARPA format.

    Args:
        words: by their numbers.
    """
    out.write(b"\\data\\\n")
    for size, level in enumerate(levels, 1):
        out.write(b"ngram %d=%d\n" % (size, len(level.ngrams)))
    for size, level in enumerate(levels, 1):
        out.write(b"\n\\%d-grams:\n" % size)
        line = b"%.7g\t%b\n" if size == len(levels) else b"%.7g\t%b\t%.7g\n"
        for start in range(0, len(level.ngrams), _WRITTEN_ROWS):
            stop = start + _WRITTEN_ROWS
            texts = (b" ".join(map(words.__getitem__, ngram)) for ngram in level.ngrams[start:stop].tolist())
            columns: list[Iterable[Any]] = [level.log10[start:stop].tolist(), texts]
            columns += [] if size == len(levels) else [level.backoffs[start:stop].tolist()]
            out.write(b"".join(line % row for row in zip(*columns, strict=True)))
    out.write(b"\n\\end\\\n")
