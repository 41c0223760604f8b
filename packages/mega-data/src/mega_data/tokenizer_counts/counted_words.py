"""Words and their counts as arrays, to train byte pairs on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from mega_data.tokenizer_counts.byte_pairs import train_byte_pairs
from mega_data.tokenizer_counts.word_counts import read_counts

CODE_POINTS = 0x110000


@dataclass(frozen=True, slots=True)
class CountedWords:
    """Words in the order of their bytes; memory: 8 bytes for each letter, and 16 for each word.

    Attributes:
        codes: (letters,) code point of each letter of the words.
        ends: (words,) end of each word in `codes`.
        counts: (words,) occurrences of each word.
    """

    codes: NDArray[np.uint32]
    ends: NDArray[np.int64]
    counts: NDArray[np.int64]

    @classmethod
    def read(cls, path: Path, min_frequency: int = 1) -> Self:
        """Read a file of counts, see `word_counts.read_counts`."""
        codes = [np.empty(0, np.uint32)]
        lengths = [np.empty(0, np.int64)]
        counts = [np.empty(0, np.int64)]
        for words, numbers in read_counts(path, min_frequency):
            codes.append(np.frombuffer("".join(words).encode("utf-32-le"), np.uint32))
            lengths.append(np.array([*map(len, words)], np.int64))
            counts.append(np.array(numbers, np.int64))
        return cls(
            np.concatenate(codes), np.cumsum(np.concatenate(lengths), dtype=np.int64), np.concatenate(counts)
        )

    def inside_letters(self, letters: Sequence[str]) -> list[str]:
        """Return those of the letters that a word has after its first letter."""
        is_inside = np.zeros(CODE_POINTS, bool)
        is_inside[self.codes[~self._is_first()]] = True
        return [letter for letter in letters if is_inside[ord(letter)]]

    def letters(self, inside: Sequence[str], private: int) -> list[str]:
        """Return the letters of the words, and a private use letter for each that is inside of words.

        They are in the order of their code points.
        """
        first = {*map(chr, np.unique(self.codes[self._is_first()]).tolist()), *inside}
        return sorted({*first, *(chr(private + number) for number in range(len(inside)))})

    def replace_inside(self, inside: Sequence[str], private: int) -> NDArray[np.uint32]:
        """Return the code points with private use letters, from `private` on, after the first of a word."""
        table = np.arange(CODE_POINTS, dtype=np.uint32)
        table[[*map(ord, inside)]] = np.arange(private, private + len(inside), dtype=np.uint32)
        return np.where(self._is_first(), self.codes, table[self.codes])

    def _is_first(self) -> NDArray[np.bool_]:
        """Return which letters are the first of a word."""
        is_first = np.zeros(len(self.codes), bool)
        if len(self.ends):
            is_first[0] = True
            is_first[self.ends[:-1]] = True
        return is_first

    def train(
        self, tokens: list[str], codes: NDArray[np.uint32], vocab_size: int
    ) -> tuple[dict[str, int], list[tuple[str, str]]]:
        """Return the vocabulary and the merges of the words.

        Args:
            tokens: the first tokens; those of one letter include all letters of `codes`.
            codes: (letters,) code points of the words.
        """
        numbers = np.zeros(CODE_POINTS, np.int32)
        for number, token in enumerate(tokens):
            if len(token) == 1:
                numbers[ord(token)] = number
        return train_byte_pairs(tokens, numbers[codes], self.ends, self.counts, vocab_size)
