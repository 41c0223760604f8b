"""Band keys of all shards to pairs of documents that share one, in bounded memory.

The range of the keys is cut so that one part of it, from all shards, fits in memory: the parts are read,
sorted and done with one after another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mega_data.dedup.band_store import Numbers, column, documents
from mega_data.dedup.minhash import NO_KEY

BYTES_PER_DOCUMENT = 64  # of keys, numbers, order and copies while a part is sorted


def pairs(files: Sequence[Path], band: int, bands: int, memory: int) -> Iterator[Numbers]:
    """(n, 2) arrays of documents that share a key: the first of them, and in turn each of the others.

    The pairs of one key come one after another, in the order of the documents.

    Args:
        files: of the shards in their order, see `columns`; documents are numbered through them from 0.
        memory: bytes to sort in.
    """
    total = sum(documents(file, bands) for file in files)
    parts = max(1, -(-total * BYTES_PER_DOCUMENT // memory))
    for part in range(parts):
        keys, numbers = _part(files, band, bands, part, parts)
        order = np.argsort(keys, kind="stable")
        keys, numbers = keys[order], numbers[order]
        same = np.flatnonzero(keys[1:] == keys[:-1]) + 1
        if not len(same):
            continue
        # where a run of equal keys begins: the last change of key at or before each place
        changed = np.ones(len(keys), bool)
        changed[1:] = keys[1:] != keys[:-1]
        begins = np.maximum.accumulate(np.where(changed, np.arange(len(keys)), 0))[same]
        yield np.stack([numbers[begins], numbers[same]], axis=1)


def _part(files: Sequence[Path], band: int, bands: int, part: int, parts: int) -> tuple[Numbers, Numbers]:
    keys, numbers, before = list[Numbers](), list[Numbers](), 0
    for file in files:
        for block in column(file, band, bands):
            chosen = block != NO_KEY
            if parts > 1:
                chosen &= (block >> np.uint64(32)) * np.uint64(parts) >> np.uint64(32) == part
            found = np.flatnonzero(chosen)
            keys.append(block[found])
            numbers.append((found + before).astype(np.uint64))
            before += len(block)
    return _joined(keys), _joined(numbers)


def _joined(arrays: list[Any]) -> Numbers:
    return np.concatenate(arrays) if arrays else np.empty(0, np.uint64)
