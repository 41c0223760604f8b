"""Split a text into words once for all steps that read its words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from itertools import count

import numpy as np
from numpy.typing import NDArray


class WordTable:
    """The words of a text, each distinct word with a number in the order of first occurrence.

    A text has far fewer distinct words than words, so a step examines the distinct ones and multiplies.

    Attributes:
        distinct: the distinct words.
        numbers: (words,) number of each word of the text.
        lengths: (words,) characters of each word.
        counts: (distinct,) occurrences of each distinct word.
    """

    def __init__(self, words: Sequence[str]) -> None:
        # a new word gets the next number in the same pass
        number_of = defaultdict[str, int](count().__next__)
        numbers = map(number_of.__getitem__, words)
        self.numbers: NDArray[np.int64] = np.fromiter(numbers, np.int64, count=len(words))
        self.distinct = list(number_of)
        distinct_lengths = np.fromiter(map(len, self.distinct), np.int64, count=len(self.distinct))
        self.lengths: NDArray[np.int64] = distinct_lengths[self.numbers]
        self.counts: NDArray[np.int64] = np.bincount(self.numbers, minlength=len(self.distinct))
        # characters of all occurrences of a word
        self.characters: NDArray[np.int64] = self.counts * distinct_lengths

    def __len__(self) -> int:
        return len(self.numbers)


@lru_cache(maxsize=1)
def word_table(text: str) -> WordTable:
    """Return the words of a text between white space; the next step on the same text reuses them."""
    return WordTable(text.split())
