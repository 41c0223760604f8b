"""Band keys of all shards to pairs of documents that share one, in bounded memory.

The keys of a band lie in one file per shard, one number per line of the shard. The range of the keys is cut
so that one part of it, from all shards, fits in memory: the parts are read, sorted and done with one after
another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mega_data.dedup.signatures import NO_KEY

Numbers = NDArray[np.uint64]
BLOCK = 1 << 20  # numbers read at once
BYTES_PER_DOCUMENT = 64  # of keys, numbers, order and copies while a part is sorted


def pairs(files: Sequence[Path], memory: int) -> Iterator[Numbers]:
    """(n, 2) arrays of documents that share a key, the smaller first.

    In a group of several each is paired with the first and with the one before it: in a line through the
    group and in a star, so that a check of pairs need not compare all with all.

    Args:
        files: a band's keys, in the order of the shards; documents are numbered through them from 0.
        memory: bytes to sort in.
    """
    documents = sum(file.stat().st_size for file in files) // 8
    parts = max(1, -(-documents * BYTES_PER_DOCUMENT // memory))
    for part in range(parts):
        keys, numbers = _part(files, part, parts)
        order = np.argsort(keys, kind="stable")
        keys, numbers = keys[order], numbers[order]
        same = np.flatnonzero(keys[1:] == keys[:-1]) + 1
        if not len(same):
            continue
        # where a run of equal keys begins: the last change of key at or before each place
        changed = np.ones(len(keys), bool)
        changed[1:] = keys[1:] != keys[:-1]
        begins = np.maximum.accumulate(np.where(changed, np.arange(len(keys)), 0))[same]
        star = np.stack([numbers[begins], numbers[same]], axis=1)
        line = np.stack([numbers[same - 1], numbers[same]], axis=1)[begins != same - 1]
        yield np.concatenate([star, line])


def _part(files: Sequence[Path], part: int, parts: int) -> tuple[Numbers, Numbers]:
    keys, numbers, before = list[Numbers](), list[Numbers](), 0
    for file in files:
        with file.open("rb") as data:
            while (block := np.frombuffer(data.read(BLOCK * 8), "<u8")).size:
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
