"""Find pairs of documents that share a band key, in bounded memory.

The key range is split so that one part of it, from all shards, fits in memory. The parts are read and sorted
one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mega_data.dedup.band_store import Numbers, count_documents, read_column
from mega_data.dedup.minhash import NO_KEY

BYTES_PER_DOCUMENT = 64  # keys, numbers, order and copies while a part is sorted


def candidate_pairs(files: Sequence[Path], band: int, bands: int, memory: int) -> Iterator[Numbers]:
    """Yield (n, 2) arrays of documents that share a key: the first of them, and each of the others.

    The pairs of one key are consecutive, in the order of the documents.

    Args:
        files: of the shards in order, see `band_store`; documents are numbered from 0 over all of them.
        memory: bytes for sorting.
    """
    total = sum(count_documents(file, bands) for file in files)
    parts = max(1, -(-total * BYTES_PER_DOCUMENT // memory))
    for part in range(parts):
        keys, numbers = _read_part(files, band, bands, part, parts)
        order = np.argsort(keys, kind="stable")
        keys, numbers = keys[order], numbers[order]
        repeats = np.flatnonzero(keys[1:] == keys[:-1]) + 1
        if not len(repeats):
            continue
        # start of each run of equal keys: the last change of key at or before each place
        is_first_of_key = np.ones(len(keys), bool)
        is_first_of_key[1:] = keys[1:] != keys[:-1]
        firsts = np.maximum.accumulate(np.where(is_first_of_key, np.arange(len(keys)), 0))[repeats]
        yield np.stack([numbers[firsts], numbers[repeats]], axis=1)


def _read_part(
    files: Sequence[Path], band: int, bands: int, part: int, parts: int
) -> tuple[Numbers, Numbers]:
    keys = list[Numbers]()
    numbers = list[Numbers]()
    first = 0
    for file in files:
        for block in read_column(file, band, bands):
            in_part = block != NO_KEY
            if parts > 1:
                in_part &= (block >> np.uint64(32)) * np.uint64(parts) >> np.uint64(32) == part
            rows = np.flatnonzero(in_part)
            keys.append(block[rows])
            numbers.append((rows + first).astype(np.uint64))
            first += len(block)
    return _concatenate(keys), _concatenate(numbers)


def _concatenate(arrays: list[Any]) -> Numbers:
    return np.concatenate(arrays) if arrays else np.empty(0, np.uint64)
