"""Store shingle sets on disk and compare pairs by Jaccard similarity."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mega_data.dedup.kernels.reference import HASH_BITS, Keys
from mega_data.output_formats import open_output

MAX_MAPPED_SHARDS = 64  # each has two memory maps, each of them an open file
MappedSets = tuple[NDArray[np.uint32], NDArray[np.uint64]]


def write_sets(folder: Path, shard: int, batches: Iterable[tuple[Keys, NDArray[np.bool_]]]) -> None:
    """Write the shingle sets of a shard's wanted documents: 32 bits of each hash, sorted and unique.

    Args:
        batches: keys of the wanted documents of a batch, numbered from 0, and which documents are wanted.
    """
    size = 0
    offsets = [np.zeros(1, np.uint64)]
    with open_output(folder / f"{shard:05d}.sets") as out:
        for keys, is_wanted in batches:
            hashes = (keys >> np.uint64(HASH_BITS - 32)).astype("<u4")
            numbers = (keys >> np.uint64(HASH_BITS)).view(np.int64)
            bounds = np.searchsorted(numbers, np.arange(np.count_nonzero(is_wanted) + 1))
            for start, end in pairwise(bounds.tolist()):
                hashes[start:end].sort()
            is_kept = np.ones(len(hashes) + 1, bool)
            np.not_equal(hashes[1:], hashes[:-1], out=is_kept[1:-1])
            is_kept[bounds] = True
            out.write(hashes[is_kept[:-1]].data)
            sizes = np.zeros(len(is_wanted), np.int64)
            sizes[is_wanted] = np.add.reduceat(is_kept, bounds, dtype=np.int64)[:-1] * (np.diff(bounds) > 0)
            ends = size + np.cumsum(sizes)
            offsets.append(ends.astype(np.uint64))
            size = int(ends[-1])
    with open_output(folder / f"{shard:05d}.offsets") as out:
        out.write(np.concatenate(offsets).astype("<u8").tobytes())


class SetReader:
    """The shingle sets of documents by number, over all shards."""

    def __init__(self, folder: Path, firsts: Sequence[int]) -> None:
        """Prepare to map the sets of a shard when they are needed.

        Args:
            firsts: number of the first document of each shard.
        """
        self.firsts = firsts
        self._folder = folder
        self._shards = OrderedDict[int, MappedSets]()

    def is_similar(self, a: int, b: int, threshold: float) -> bool:
        """Return whether the Jaccard similarity is `threshold` or more; an empty set is similar to none."""
        set_a, set_b = self._set(a), self._set(b)
        small, large = sorted((len(set_a), len(set_b)))
        if not small or small < threshold * large:  # the sizes bound the similarity
            return False
        union = np.concatenate([set_a, set_b])
        union.sort()
        shared = int(np.count_nonzero(union[1:] == union[:-1]))
        return shared >= threshold * (len(union) - shared)

    def _set(self, document: int) -> NDArray[np.uint32]:
        shard = bisect_right(self.firsts, document) - 1
        sets, offsets = self._map_shard(shard)
        index = document - self.firsts[shard]
        return sets[int(offsets[index]) : int(offsets[index + 1])]

    def _map_shard(self, shard: int) -> MappedSets:
        """Return the maps of a shard; drop those of the shard that was used longest ago."""
        if shard not in self._shards:
            if len(self._shards) == MAX_MAPPED_SHARDS:
                self._shards.popitem(last=False)
            self._shards[shard] = _map_sets(self._folder, shard)
        self._shards.move_to_end(shard)
        return self._shards[shard]


def _map_sets(folder: Path, shard: int) -> MappedSets:
    sets, offsets = folder / f"{shard:05d}.sets", folder / f"{shard:05d}.offsets"
    empty = np.empty(0, np.uint32)
    return (
        np.memmap(sets, "<u4", "r").view(np.ndarray) if sets.stat().st_size else empty,
        np.memmap(offsets, "<u8", "r").view(np.ndarray),
    )
