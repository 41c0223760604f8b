"""Read n-gram models in ARPA format, and score texts with them as KenLM does.

The logarithm of the probability of a word is that of the longest n-gram in the model that ends with the word,
plus the backoff weights of the longer contexts that are in the model (Katz 1987, as in Chen and Goodman 1999,
section 2.8). A word that the model does not have counts as <unk>, with log10 -100 if the model has no <unk>.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mega_data.readers.versions import FileVersion
from mega_schema.errors import FormatError

Numbers = NDArray[np.int64]
Logs = NDArray[np.float32]  # log10, as KenLM stores them
BEGIN, END, UNKNOWN = b"<s>", b"</s>", b"<unk>"
_UNKNOWN_LOG10 = -100.0  # KenLM's for a model without <unk>
_DATA = b"\\data\\"
_GZIP_MAGIC = b"\x1f\x8b"
_KENLM_MAGIC = b"mmap lm http://kheafield.com/code format version"
_MISSING = -1


@dataclass(frozen=True, slots=True)
class NgramLevel:
    """The n-grams of one order, sorted by `keys`.

    Attributes:
        keys: row of the first n-1 words in the level below, times the stride, plus the last word's number.
    """

    keys: Numbers
    probabilities: Logs
    backoffs: Logs

    def find(self, keys: Numbers) -> Numbers:
        """Return the row of each key; -1 where there is none."""
        if not len(self.keys):
            return np.full(len(keys), _MISSING)
        rows = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where(self.keys[rows] == keys, rows, _MISSING)


@dataclass(frozen=True, slots=True)
class NgramModel:
    """An n-gram model.

    Attributes:
        words: number of each word, in the order of the file; without <unk> its number is that of no row.
        levels: n-grams of 1, 2 ... words.
    """

    words: dict[bytes, int]
    levels: tuple[NgramLevel, ...]

    def score(self, sentences: Iterable[Sequence[bytes]]) -> tuple[float, int]:
        """Return the log10 of the probability of sentences, and the number of scored words.

        Each sentence begins after <s> and ends with </s>, which is one of its scored words. Sums are float64;
        KenLM adds up float32.
        """
        numbers = list[int]()
        places = list[int]()
        begin, end, unknown = self.words[BEGIN], self.words[END], self._unknown_number
        for sentence in sentences:
            numbers += [begin, *(self.words.get(word, unknown) for word in sentence), end]
            places += range(len(sentence) + 2)
        place = np.array(places)
        logs = self._log_probabilities(np.array(numbers), place)
        is_scored = place > 0
        return float(logs[is_scored].sum(dtype=np.float64)), int(np.count_nonzero(is_scored))

    @property
    def _unknown_number(self) -> int:
        return self.words.get(UNKNOWN, len(self.words))

    @property
    def _stride(self) -> int:
        return len(self.words) + 1

    def _log_probabilities(self, numbers: Numbers, places: Numbers) -> Logs:
        """Return the log10 of the probability of each word.

        Args:
            numbers: (words,) the number of each word.
            places: (words,) place of each word in its sentence; n-grams do not cross sentences.
        """
        rows = [numbers]  # of the n-gram that ends with each word, for each n
        logs = self.levels[0].probabilities[numbers]
        sizes = np.ones(len(numbers), np.int64)  # of the longest n-gram
        for size, level in enumerate(self.levels[1:], 2):
            contexts = rows[-1][:-1]
            keys = np.where(
                (contexts != _MISSING) & (places[1:] >= size - 1), contexts * self._stride + numbers[1:], -1
            )
            level_rows = np.concatenate([[_MISSING], level.find(keys)])
            is_longer = level_rows != _MISSING
            logs[is_longer] = level.probabilities[level_rows[is_longer]]
            sizes[is_longer] = size
            rows.append(level_rows)
        for size, level in enumerate(self.levels[:-1], 1):
            contexts = rows[size - 1][:-1]
            # the context is of the same sentence, and no longer n-gram covers it
            has_backoff = (contexts != _MISSING) & (sizes[1:] <= size) & (places[1:] >= size)
            logs[1:][has_backoff] += level.backoffs[contexts[has_backoff]]
        return logs


def is_arpa(path: Path) -> bool:
    """Return whether a file begins as a model in ARPA format, plain or .gz."""
    with path.open("rb") as file:
        is_gzip = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
    try:
        with gzip.open(path) if is_gzip else path.open("rb") as lines:
            return lines.read(len(_DATA)) == _DATA
    except (OSError, EOFError, zlib.error):
        return False


@lru_cache(maxsize=2)
def load_arpa(path: Path, version: FileVersion) -> NgramModel:
    """Read a model; `version` of the file is part of the cache key.

    Raises:
        FormatError: it is not an ARPA file, or misses n-grams.
    """
    with path.open("rb") as file:
        magic = file.read(len(_KENLM_MAGIC))
    if magic == _KENLM_MAGIC:
        hint = "use the ARPA file from which KenLM's build_binary made it"
        raise FormatError(path, "a binary model of KenLM", wanted="an ARPA file, plain or .gz", hint=hint)
    with gzip.open(path) if magic.startswith(_GZIP_MAGIC) else path.open("rb") as lines:
        try:
            return _ArpaReader(path, lines).read()
        except (OSError, EOFError, zlib.error) as error:
            raise FormatError(path, "not readable", found=error) from None


class _ArpaReader:
    """Reads the sections of an ARPA file: counts, then the n-grams of each order."""

    def __init__(self, path: Path, lines: Iterable[bytes]) -> None:
        self._path = path
        self._lines = enumerate(lines, 1)

    def read(self) -> NgramModel:
        counts = self._read_counts()
        words = dict[bytes, int]()
        levels = list[NgramLevel]()
        for size, count in enumerate(counts, 1):
            rows = [self._split(number, line, size) for number, line in islice(self._lines, count)]
            if len(rows) < count:
                raise self._error(None, f"n-grams of {size} words", found=len(rows), wanted=count)
            ngrams, *weights = zip(*rows, strict=True) if rows else ((), (), ())
            if size == 1:
                words = {word: number for number, (word,) in enumerate(ngrams)}
                keys = np.arange(count)
                self._check_words(words, count)
            else:
                keys = self._make_keys(ngrams, words, levels)
            order = np.argsort(keys)
            if size > 1 and np.any(np.diff(keys[order]) == 0):
                raise self._error(None, f"n-grams of {size} words", found="one of them twice")
            logs = [np.array(values, np.float32)[order] for values in weights]
            levels.append(NgramLevel(keys[order], *logs))
            self._expect(b"\\end\\" if size == len(counts) else b"\\%d-grams:" % (size + 1))
        if UNKNOWN not in words:
            lowest = levels[0]
            probabilities = np.append(lowest.probabilities, np.float32(_UNKNOWN_LOG10))
            levels[0] = NgramLevel(lowest.keys, probabilities, np.append(lowest.backoffs, np.float32(0)))
        return NgramModel(words, tuple(levels))

    def _read_counts(self) -> list[int]:
        self._expect(_DATA)
        counts = list[int]()
        for number, line in self._lines:
            text = line.strip()
            if not text:
                continue
            if text == rb"\1-grams:" and counts:
                return counts
            name, _, count = text.partition(b"=")
            if name.split() != [b"ngram", b"%d" % (len(counts) + 1)] or not count.strip().isdigit():
                wanted = f"ngram {len(counts) + 1}=COUNT"
                raise self._error(number, "not an ARPA file", found=_quote(text), wanted=wanted)
            counts.append(int(count))
        raise self._error(None, "not an ARPA file", found="no n-grams", wanted=r"\1-grams:")

    def _split(self, number: int, line: bytes, size: int) -> tuple[list[bytes], float, float]:
        """Return the words of an n-gram, its log10, and the log10 of its backoff weight."""
        parts = line.split()
        try:
            if len(parts) - size not in (1, 2):
                raise ValueError
            logs = (float(parts[0]), float(parts[-1]) if len(parts) == size + 2 else 0.0)
        except ValueError:
            wanted = f"log10, {size} words, and a backoff weight or none"
            raise self._error(number, "not an n-gram", found=_quote(line), wanted=wanted) from None
        if not logs[0] <= 0 or logs[1] != logs[1]:
            what = "not the log10 of a probability"
            raise self._error(number, what, found=_quote(line), wanted="0 or less")
        return parts[1 : size + 1], *logs

    def _check_words(self, words: dict[bytes, int], count: int) -> None:
        if len(words) < count:
            raise self._error(None, "n-grams of 1 word", found="one of them twice")
        for word in (BEGIN, END):
            if word not in words:
                found = f"no {word.decode()}"
                raise self._error(None, "n-grams of 1 word", found=found, wanted="<s> and </s>")

    def _make_keys(
        self, ngrams: Sequence[Sequence[bytes]], words: dict[bytes, int], levels: Sequence[NgramLevel]
    ) -> Numbers:
        try:
            numbers = np.array([[words[word] for word in ngram] for ngram in ngrams], np.int64)
        except KeyError as error:
            what = "a word without an n-gram of 1 word"
            raise self._error(None, what, found=_quote(error.args[0])) from None
        if not len(numbers):
            return np.empty(0, np.int64)
        stride = len(words) + 1
        rows = numbers[:, 0]
        for column, level in enumerate(levels[1:], 1):
            rows = level.find(rows * stride + numbers[:, column])
            if np.any(rows == _MISSING):
                ngram = ngrams[int(np.argmax(rows == _MISSING))]
                found = " ".join(map(_quote, ngram[: column + 1]))
                what = f"an n-gram of {len(ngram)} words without that of its first {column + 1}"
                raise self._error(None, what, found=found)
        return rows * stride + numbers[:, -1]

    def _expect(self, text: bytes) -> None:
        """Read lines up to one of this text, which only blank lines may precede."""
        for number, line in self._lines:
            if line.strip() == text:
                return
            if line.strip():
                raise self._error(number, "not an ARPA file", found=_quote(line), wanted=text.decode())
        raise self._error(None, "not an ARPA file", found="end of the file", wanted=text.decode())

    def _error(self, number: int | None, what: str, **values: object) -> FormatError:
        where = str(self._path) if number is None else f"{self._path}:{number}"
        hint = "KenLM's lmplz and SRILM's ngram-count write ARPA files"
        return FormatError(where, what, **values, hint=hint)


def _quote(text: bytes) -> str:
    return repr(text.strip()[:80].decode("utf-8", "replace"))
