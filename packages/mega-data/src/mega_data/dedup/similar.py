"""Shingle sets kept on disk, for the documents that have a pair, and what they say of a pair."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mega_data.dedup.shingles import HASH_BITS, Keys
from mega_data.shards import writing

Sets = tuple[NDArray[np.uint32], NDArray[np.uint64]]


def write_sets(folder: Path, shard: int, batches: Iterable[tuple[Keys, NDArray[np.bool_]]]) -> None:
    """Write the shingle sets of a shard's wanted documents, as 32 bits of each hash, sorted.

    Args:
        batches: keys of consecutive documents numbered from 0, and for each document whether it is wanted.
    """
    at, offsets = 0, [np.zeros(1, np.uint64)]
    with writing(folder / f"{shard:05d}.sets") as out:
        for keys, wanted in batches:
            keys = np.unique(keys)
            documents = (keys >> np.uint64(HASH_BITS)).astype(np.int64)
            chosen = wanted[documents]
            keys, documents = keys[chosen], documents[chosen]
            out.write((keys >> np.uint64(HASH_BITS - 32)).astype("<u4").tobytes())
            ends = at + np.cumsum(np.bincount(documents, minlength=len(wanted)))
            offsets.append(ends.astype(np.uint64))
            at = int(ends[-1]) if len(ends) else at
    with writing(folder / f"{shard:05d}.offsets") as out:
        out.write(np.concatenate(offsets).astype("<u8").tobytes())


class SetReader:
    """The shingle sets of documents by their number, through all shards."""

    def __init__(self, folder: Path, firsts: Sequence[int]) -> None:
        """
        Args:
            firsts: number of the first document of each shard.
        """
        self.firsts = np.asarray(firsts)
        self._shards = [_mapped(folder, shard) for shard in range(len(firsts))]

    def jaccard(self, a: int, b: int) -> float:
        """Size of the intersection over that of the union; 0 where both are empty."""
        one, other = self._set(a), self._set(b)
        together = np.concatenate([one, other])
        together.sort()
        shared = int(np.count_nonzero(together[1:] == together[:-1]))
        return shared / max(1, len(together) - shared)

    def _set(self, document: int) -> NDArray[np.uint32]:
        shard = int(np.searchsorted(self.firsts, document, "right")) - 1
        sets, offsets = self._shards[shard]
        place = document - int(self.firsts[shard])
        # shingles whose hashes agree in 32 bits are one here
        return np.unique(sets[int(offsets[place]) : int(offsets[place + 1])])


def _mapped(folder: Path, shard: int) -> Sets:
    sets, offsets = folder / f"{shard:05d}.sets", folder / f"{shard:05d}.offsets"
    empty = np.empty(0, np.uint32)
    return (
        np.memmap(sets, "<u4", "r") if sets.stat().st_size else empty,
        np.memmap(offsets, "<u8", "r"),
    )
