"""Split a text into words once for all steps that read its words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import count
from typing import overload

import numpy as np
from numpy.typing import NDArray

from mega_data.clean.kernels import Flags, Numbers, load_kernels

_BLOCK = 256  # words that are read at once


class WordTable:
    """The words of a text, each distinct word with a number in the order of first occurrence.

    A text has far fewer distinct words than words, so a step examines the distinct ones and multiplies.

    Attributes:
        distinct: the distinct words.
        numbers: (words,) number of each word of the text.
        lengths: (words,) characters of each word.
        counts: (distinct,) occurrences of each distinct word.
        has_ascii_letter: (distinct,) whether the word contains an ASCII letter; None if unknown.
    """

    def __init__(
        self,
        distinct: Sequence[str],
        numbers: Numbers,
        distinct_lengths: Numbers,
        has_ascii_letter: Flags | None = None,
    ) -> None:
        self.distinct = distinct
        self.numbers = numbers
        self.has_ascii_letter = has_ascii_letter
        self.lengths: NDArray[np.int64] = distinct_lengths[self.numbers]
        self.counts: NDArray[np.int64] = np.bincount(self.numbers, minlength=len(self.distinct))
        # characters of all occurrences of a word
        self.characters: NDArray[np.int64] = self.counts * distinct_lengths

    def __len__(self) -> int:
        return len(self.numbers)


class TextSpans(Sequence[str]):
    """Parts of a text, made when they are read: most steps need few of the words."""

    def __init__(self, text: str, starts: Numbers, ends: Numbers) -> None:
        self._text = text
        self._starts = starts
        self._ends = ends

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        if isinstance(index, slice):
            return TextSpans(self._text, self._starts[index], self._ends[index])
        return self._text[self._starts[index] : self._ends[index]]

    def __iter__(self) -> Iterator[str]:
        for first in range(0, len(self), _BLOCK):
            spans = (ends[first : first + _BLOCK].tolist() for ends in (self._starts, self._ends))
            yield from (self._text[start:end] for start, end in zip(*spans, strict=True))


@lru_cache(maxsize=1)
def word_table(text: str) -> WordTable:
    """Return the words of a text between white space; the next step on the same text reuses them."""
    kernels = load_kernels()
    if kernels is None:
        return number_words(text.split())
    numbers, starts, ends, has_ascii_letter = kernels.split_words(text)
    return WordTable(TextSpans(text, starts, ends), numbers, ends - starts, has_ascii_letter)


def number_words(words: Sequence[str]) -> WordTable:
    """Return the table of these words."""
    # a new word gets the next number in the same pass
    number_of = defaultdict[str, int](count().__next__)
    numbers = np.fromiter(map(number_of.__getitem__, words), np.int64, count=len(words))
    distinct = list(number_of)
    return WordTable(distinct, numbers, np.fromiter(map(len, distinct), np.int64, count=len(distinct)))
