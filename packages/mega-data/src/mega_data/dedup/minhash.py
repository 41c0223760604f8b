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

from mega_data.dedup.kernels import HashKernels, load_kernels
from mega_data.dedup.kernels.reference import EMPTY, MIX, MULTIPLIER, Keys

NO_KEY = np.uint64(0)  # the band key of a document without shingles


def minhash_signatures(
    parts: Iterable[Keys], documents: int, bins: int, kernels: HashKernels | None = None
) -> NDArray[np.uint64]:
    """Return (documents, bins) smallest hashes; a row of EMPTY for a document without shingles.

    Args:
        parts: the result of `Shingles.keys_in_pieces`: documents are numbered from 0.
    """
    smallest = np.full(documents * bins, EMPTY)
    kernels = kernels or load_kernels()
    for keys in parts:
        kernels.update_smallest(smallest, keys, bins)
    table = smallest.reshape(documents, bins)
    kernels.fill_empty(table)
    return table


def band_keys(table: NDArray[np.uint64], bands: int) -> NDArray[np.uint64]:
    """Return (documents, bands) keys, one per band; NO_KEY for a document without shingles."""
    rows = table.reshape(len(table), bands, -1)
    keys = np.zeros(rows.shape[:2], np.uint64)
    for row in range(rows.shape[2]):
        keys += rows[:, :, row]
        keys *= MULTIPLIER
        keys ^= keys >> np.uint64(29)
    keys *= MIX
    keys[table[:, 0] == EMPTY] = NO_KEY
    return keys
