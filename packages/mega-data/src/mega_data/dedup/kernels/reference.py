"""The numpy definition of the hashing kernels, and the constants that all kernels share.

A shingle is one 64-bit key: its document's number in the batch in the upper 20 bits, a 44-bit hash below.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]
Numbers = NDArray[np.int64]
HASH_BITS = 44
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd, from the golden ratio
FIRST, SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)  # splitmix64's multipliers
MIX = np.uint64(0xD6E8FEB86659FD93)  # odd
EMPTY = np.uint64(2**64 - 1)  # the value of a bin without hashes

SPACE, LETTER, DIGIT, DROPPED, IDEOGRAPH = range(5)  # classes of characters


def hash_words(
    codes: NDArray[Any], ends: Numbers, classes: NDArray[np.uint8], powers: Keys
) -> tuple[Numbers, Keys]:
    """Return the document and the hash of each word.

    Args:
        codes: code points of the documents, each followed by a line break; uint8 or uint32, not changed.
        ends: (documents,) end of each document in `codes`, its line break included.
        classes: class of each code point; the last one is that of all code points beyond.
        powers: factors of the characters of a word, a power of two of them; a longer word repeats them.
    """
    codes = codes.astype(np.uint32)
    kinds = classes[np.minimum(codes, len(classes) - 1)]
    is_kept = kinds != DROPPED
    is_digit = kinds == DIGIT
    is_kept[1:] &= ~(is_digit[1:] & is_digit[:-1])
    codes[is_digit] = ord("0")
    if not is_kept.all():
        ends = np.cumsum(is_kept)[ends - 1]
        codes, kinds = codes[is_kept], kinds[is_kept]
    is_word = kinds != SPACE
    is_ideograph = kinds == IDEOGRAPH
    is_start = is_word.copy()
    is_start[1:] &= ~is_word[:-1] | is_ideograph[1:] | is_ideograph[:-1]
    starts = np.flatnonzero(is_start)
    if not len(starts):
        return np.empty(0, np.int64), np.empty(0, np.uint64)
    places = np.arange(len(codes))
    places -= np.repeat(np.concatenate([[0], starts]), np.diff(np.concatenate([[0], starts, [len(codes)]])))
    values = codes.astype(np.uint64)
    values *= FIRST
    values ^= values >> np.uint64(29)
    values *= powers[places & (len(powers) - 1)]
    values *= is_word
    words = np.add.reduceat(values, starts)
    words ^= words >> np.uint64(31)
    words *= SECOND
    return np.searchsorted(ends, starts, "right"), words


def shingle_keys(documents: Numbers, units: Keys, size: int, last: int, seed: int) -> Keys:
    """Return the keys of all shingles of `size` units.

    Args:
        documents: (units,) document of each unit.
        last: a shingle counts if the unit at this distance from its first is of the same document.
    """
    count = len(units) - last
    if count <= 0:
        return np.empty(0, np.uint64)
    hashes = units[:count] + np.uint64(seed)
    for offset in range(1, size):
        hashes *= MULTIPLIER
        hashes += units[offset : offset + count]
    in_one_document = documents[:count] == documents[last:]
    hashes *= FIRST
    hashes ^= hashes >> np.uint64(32)
    hashes *= SECOND
    keys = documents[:count].astype(np.uint64)
    keys <<= np.uint64(HASH_BITS)
    keys |= hashes >> np.uint64(64 - HASH_BITS)
    selected: Keys = keys[in_one_document]
    return selected


def update_smallest(smallest: Keys, keys: Keys, bins: int) -> None:
    """Lower each document's smallest hashes to those of its keys, in place.

    Args:
        smallest: (documents * bins,) values; the hash range is split into `bins` equal parts.
    """
    low = keys & np.uint64((1 << HASH_BITS) - 1)
    cell = keys >> np.uint64(HASH_BITS)
    cell *= np.uint64(bins)
    cell += low * np.uint64(bins) >> np.uint64(HASH_BITS)
    np.minimum.at(smallest, cell.view(np.int64), low)


def fill_empty(table: Keys) -> None:
    """Fill each empty bin with the value of a full one, the same for every document where that is full.

    Args:
        table: (documents, bins) smallest hashes; a document without shingles stays EMPTY.
    """
    full = table != EMPTY
    row, column = np.nonzero(~full & full.any(axis=1)[:, None])
    bins = np.uint64(table.shape[1])
    attempt = 0
    while len(row):
        attempt += 1
        # Python's integers: numpy warns when the product of two scalars overflows
        drawn = column.astype(np.uint64) + np.uint64(attempt * int(MULTIPLIER) % 2**64)
        drawn *= MIX
        drawn ^= drawn >> np.uint64(32)
        drawn *= MULTIPLIER
        source = ((drawn >> np.uint64(32)) * bins >> np.uint64(32)).astype(np.int64)
        hit = full[row, source]
        table[row[hit], column[hit]] = table[row[hit], source[hit]]
        row, column = row[~hit], column[~hit]
