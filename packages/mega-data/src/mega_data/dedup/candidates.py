"""Band keys of all shards to pairs of documents that share one, in bounded memory.

The range of the keys is cut so that one part of it, from all shards, fits in memory: the parts are read,
sorted and done with one after another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mega_data.dedup.band_store import Numbers, count_documents, read_column
from mega_data.dedup.minhash import NO_KEY

BYTES_PER_DOCUMENT = 64  # of keys, numbers, order and copies while a part is sorted


def candidate_pairs(files: Sequence[Path], band: int, bands: int, memory: int) -> Iterator[Numbers]:
    """(n, 2) arrays of documents that share a key: the first of them, and in turn each of the others.

    The pairs of one key come one after another, in the order of the documents.

    Args:
        files: of the shards in their order, see `columns`; documents are numbered through them from 0.
        memory: bytes to sort in.
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
        # where a run of equal keys begins: the last change of key at or before each place
        is_first_of_key = np.ones(len(keys), bool)
        is_first_of_key[1:] = keys[1:] != keys[:-1]
        firsts = np.maximum.accumulate(np.where(is_first_of_key, np.arange(len(keys)), 0))[repeats]
        yield np.stack([numbers[firsts], numbers[repeats]], axis=1)


def _read_part(
    files: Sequence[Path], band: int, bands: int, part: int, parts: int
) -> tuple[Numbers, Numbers]:
    keys, numbers, first = list[Numbers](), list[Numbers](), 0
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
