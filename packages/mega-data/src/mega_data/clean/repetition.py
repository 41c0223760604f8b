"""Drop documents with repeated lines, paragraphs and n-grams: Gopher's repetition rules."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mega_data.clean.kernels import WordKernels, load_kernels
from mega_data.clean.step import RowFunction
from mega_data.clean.words import WordTable, word_table

Numbers = NDArray[np.int64]

# words, and the maximum share of characters: of the most frequent n-gram up to 4, of all repeated ones from 5
_TOP_LIMITS = ((2, 0.2), (3, 0.18), (4, 0.16))
_REPEATED_LIMITS = ((5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.1))
_MAX_KEY = 2**63


@dataclass(frozen=True, slots=True)
class GopherRepetition:
    """Drop documents that fail the repetition rules of Gopher's MassiveText (arXiv:2112.11446, table A1)."""

    def start(self) -> RowFunction:
        return lambda row: repetition_reason(row.text) or [row]


def repetition_reason(text: str) -> str:
    """Return the first rule that a text fails, or ""."""
    body = text.strip()
    paragraphs = re.split(r"\n{2,}", body) if "\n\n" in body else [body]
    lines = list(filter(None, body.split("\n"))) or [body]
    for name, parts in (("lines", lines), ("paragraphs", paragraphs)):
        repeated = _repeated_parts(parts)
        if len(repeated) > 0.3 * len(parts):
            return f"more than 30% of {name} are repeated"
        if sum(map(len, repeated)) > 0.2 * len(text):
            return f"more than 20% of characters in repeated {name}"
    table = word_table(text)
    kernels = load_kernels()
    return _ngram_reason(table, len(text)) if kernels is None else _cpp_reason(kernels, table, len(text))


def _repeated_parts(parts: Sequence[str]) -> list[str]:
    """Return the parts that occurred before."""
    if len(set(parts)) == len(parts):
        return []
    seen = set[str]()
    repeated = list[str]()
    for part in parts:
        if part in seen:
            repeated.append(part)
        seen.add(part)
    return repeated


def _cpp_reason(kernels: WordKernels, table: WordTable, characters: int) -> str:
    """Return the result of `_ngram_reason`."""
    counts = kernels.repeated_characters(table.numbers, table.lengths)
    limits = (*_TOP_LIMITS, *_REPEATED_LIMITS)
    for (size, limit), count in zip(limits, counts, strict=False):
        if count > limit * characters:
            return _reason(size, limit)
    return ""


def _reason(size: int, limit: float) -> str:
    where = f"one {size}-gram" if size <= _TOP_LIMITS[-1][0] else f"repeated {size}-grams"
    return f"more than {limit:.0%} of characters in {where}"


def _ngram_reason(table: WordTable, characters: int) -> str:
    """Return the first limit on n-grams that a text exceeds, or "".

    An n-gram can occur more than once only where both (n-1)-grams in it do, so only the positions of
    repeated (n-1)-grams are examined for n.
    """
    offsets = np.concatenate([[0], np.cumsum(table.lengths)])
    start = _first_size(table, characters)
    positions = classes = np.empty(0, np.int64)
    for size, limit in (*_TOP_LIMITS, *_REPEATED_LIMITS):
        if len(table) < size:
            return ""
        if size < start:
            continue
        if size == start:
            positions, classes = _find_repeated(*_all_ngrams(table, size))
        else:
            positions, classes = _find_repeated(*_lengthen(positions, classes, table, size))
        if not len(positions):
            return ""
        if size <= _TOP_LIMITS[-1][0]:
            count, first = _most_frequent(positions, classes)
            if count * (offsets[first + size] - offsets[first]) > limit * characters:
                return _reason(size, limit)
        elif _repeated_characters(positions, classes, table, size) > limit * characters:
            return _reason(size, limit)
    return ""


def _first_size(table: WordTable, characters: int) -> int:
    """Return the first size of n-grams to examine: the limits of smaller ones are certainly not exceeded."""
    most = int(table.characters.max(initial=0))
    for size, limit in _TOP_LIMITS:
        # all occurrences of an n-gram have at most `most` characters in each of its words
        if size * most > limit * characters or len(table.distinct) ** (size + 1) >= _MAX_KEY:
            return size
    return _REPEATED_LIMITS[0][0]


def _all_ngrams(table: WordTable, size: int) -> tuple[Numbers, Numbers]:
    """Return the positions of all n-grams and a key of each: its word numbers as digits of one number."""
    count = len(table) - size + 1
    keys = table.numbers[:count]
    for offset in range(1, size):
        keys = keys * len(table.distinct) + table.numbers[offset : offset + count]
    return np.arange(count), keys


def _lengthen(positions: Numbers, classes: Numbers, table: WordTable, size: int) -> tuple[Numbers, Numbers]:
    """Return the positions and keys of the n-grams of `size` words that may occur more than once.

    Args:
        positions: ascending first words of the n-grams of `size` - 1 words that occur more than once.
        classes: a number for each of these n-grams, equal for equal ones.
    """
    is_followed = np.zeros(len(positions), bool)
    np.equal(positions[1:], positions[:-1] + 1, out=is_followed[:-1])
    positions, classes = positions[is_followed], classes[is_followed]
    return positions, classes * len(table.distinct) + table.numbers[positions + (size - 1)]


def _find_repeated(positions: Numbers, keys: Numbers) -> tuple[Numbers, Numbers]:
    """Return the positions of keys that occur more than once, and a class of each: equal for equal keys."""
    ordered = np.sort(keys)
    repeated_keys = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    if not len(repeated_keys):
        return positions[:0], keys[:0]
    classes = np.searchsorted(repeated_keys, keys)
    classes[classes == len(repeated_keys)] = 0
    is_repeated = repeated_keys[classes] == keys
    return positions[is_repeated], classes[is_repeated]


def _most_frequent(positions: Numbers, classes: Numbers) -> tuple[int, int]:
    """Return the count and the first position of the most frequent n-gram, the first of several."""
    counts = np.bincount(classes)
    count = int(counts.max())
    return count, int(positions[np.argmax(counts[classes] == count)])


def _repeated_characters(positions: Numbers, classes: Numbers, table: WordTable, size: int) -> int:
    """Count the characters of words in n-grams that occurred before."""
    is_first = np.zeros(len(positions), bool)
    is_first[np.unique(classes, return_index=True)[1]] = True
    repeats = positions[~is_first]
    edges = np.zeros(len(table) + 1, np.int64)
    edges[repeats] += 1  # the positions differ
    edges[repeats + size] -= 1
    return int(table.lengths[np.cumsum(edges)[:-1] > 0].sum())
