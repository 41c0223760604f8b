"""Compute MinHash signatures with one permutation, and band keys of signatures.

There is one hash per shingle instead of one per shingle and signature value. The hash range is split into
bins, and the smallest hash of each bin is a value of the signature. An empty bin copies the value of another
bin chosen by hash (optimal densification, Shrivastava, arXiv:1703.04664). Two documents agree on a value with
the probability of their Jaccard similarity, as with many permutations.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from mega_data.dedup.shingles import HASH_BITS, Keys

EMPTY = np.uint64(2**64 - 1)
NO_KEY = np.uint64(0)  # the band key of a document without shingles
_MASK = np.uint64((1 << HASH_BITS) - 1)
_MULTIPLIER, _MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)


def minhash_signatures(parts: Iterable[Keys], documents: int, bins: int) -> NDArray[np.uint64]:
    """Return (documents, bins) smallest hashes; a row of EMPTY for a document without shingles.

    Args:
        parts: the result of `Shingles.keys_in_pieces`: documents are numbered from 0.
    """
    smallest = np.full(documents * bins, EMPTY)
    for keys in parts:
        low = keys & _MASK
        cell = keys >> np.uint64(HASH_BITS)
        cell *= np.uint64(bins)
        cell += low * np.uint64(bins) >> np.uint64(HASH_BITS)
        np.minimum.at(smallest, cell.view(np.int64), low)
    table = smallest.reshape(documents, bins)
    _densify(table)
    return table


def _densify(table: NDArray[np.uint64]) -> None:
    """Fill each empty bin with the value of a full one, the same for every document where that is full."""
    full = table != EMPTY
    row, column = np.nonzero(~full & full.any(axis=1)[:, None])
    bins = np.uint64(table.shape[1])
    attempt = 0
    while len(row):
        attempt += 1
        # Python's integers: numpy warns when the product of two scalars overflows
        drawn = column.astype(np.uint64) + np.uint64(attempt * int(_MULTIPLIER) % 2**64)
        drawn *= _MIX
        drawn ^= drawn >> np.uint64(32)
        drawn *= _MULTIPLIER
        source = ((drawn >> np.uint64(32)) * bins >> np.uint64(32)).astype(np.int64)
        hit = full[row, source]
        table[row[hit], column[hit]] = table[row[hit], source[hit]]
        row, column = row[~hit], column[~hit]


def band_keys(table: NDArray[np.uint64], bands: int) -> NDArray[np.uint64]:
    """Return (documents, bands) keys, one per band; NO_KEY for a document without shingles."""
    rows = table.reshape(len(table), bands, -1)
    keys = np.zeros(rows.shape[:2], np.uint64)
    for row in range(rows.shape[2]):
        keys += rows[:, :, row]
        keys *= _MULTIPLIER
        keys ^= keys >> np.uint64(29)
    keys *= _MIX
    keys[table[:, 0] == EMPTY] = NO_KEY
    return keys
