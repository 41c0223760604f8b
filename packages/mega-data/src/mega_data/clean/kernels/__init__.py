"""Kernels in C++ for the words of a text, where a compiler is installed."""

from __future__ import annotations

import logging
from ctypes import byref, c_long, c_void_p
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mega_schema.cpp_library import PORTABLE_FLAGS, CompileError, load_library

log = logging.getLogger("mega.data")

Numbers = NDArray[np.int64]
Flags = NDArray[np.bool_]
_SIZES = 9  # of n-grams, from 2 to 10 words


class WordKernels:
    """The C++ kernels of this folder.

    Raises:
        CompileError: they cannot be compiled on this machine.
    """

    def __init__(self) -> None:
        library = load_library(str(Path(__file__).parent), PORTABLE_FLAGS)
        self._split_ascii = library.mega_split_words_u8
        self._split_wide = library.mega_split_words_u32
        self._repeated_characters = library.mega_repeated_characters
        for function in (self._split_ascii, self._split_wide):
            function.argtypes = [c_void_p, c_long, *[c_void_p] * 5]
            function.restype = c_long
        self._repeated_characters.argtypes = [c_void_p, c_void_p, c_long, c_void_p]
        self._repeated_characters.restype = c_long

    def split_words(self, text: str) -> tuple[Numbers, Numbers, Numbers, Flags]:
        """Split a text into words, and number the distinct ones in the order of first occurrence.

        Returns:
            (words,) number of each word; (distinct,) first character, end, and whether the word contains an
            ASCII letter.
        """
        is_ascii = text.isascii()
        codes = text.encode("ascii") if is_ascii else text.encode("utf-32-le", "surrogatepass")
        limit = (len(text) + 1) // 2  # white space separates words
        numbers, starts, ends = np.empty((3, limit), np.int64)
        has_letter = np.empty(limit, bool)
        distinct = c_long()
        split = self._split_ascii if is_ascii else self._split_wide
        pointers = [array.ctypes.data for array in (numbers, starts, ends, has_letter)]
        count = split(codes, len(text), *pointers, byref(distinct))
        # copies, so that the table is smaller than the text
        spans = (starts[: distinct.value].copy(), ends[: distinct.value].copy())
        return numbers[:count].copy(), *spans, has_letter[: distinct.value].copy()

    def repeated_characters(self, numbers: Numbers, lengths: Numbers) -> list[int]:
        """Return a number of characters for n-grams of 2, 3 ... words, while one occurs more than once.

        Up to 4 words it is that of all occurrences of the most frequent n-gram, the first of several; from 5
        that of the words in n-grams that occurred before.

        Args:
            numbers: number of each word, below 2^32.
            lengths: characters of each word.
        """
        characters = np.empty(_SIZES, np.int64)
        pointers = (numbers.ctypes.data, lengths.ctypes.data)
        count = self._repeated_characters(*pointers, len(numbers), characters.ctypes.data)
        sizes: list[int] = characters[:count].tolist()
        return sizes


@cache
def load_kernels() -> WordKernels | None:
    """Return the kernels; None where they cannot be compiled. The first call on a machine compiles them."""
    try:
        return WordKernels()
    except CompileError as error:
        log.info("clean counts words with numpy: %s", error)
        return None
