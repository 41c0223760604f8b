"""The files that the stages of a deduplication exchange in its work folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mega_data.dedup.presets import Preset
from mega_data.dedup.sorted_runs import SortedRun, count_cells

BLOCK_PAIRS = 1 << 16  # read or written at once


@dataclass(frozen=True, slots=True)
class WorkFiles:
    """The files that the stages of a deduplication exchange in its work folder.

    Attributes:
        groups: groups of consecutive shards, whose keys a task sorts.
        ranges: equal parts of the key range, a power of two; a task finds the pairs of a part of a band.
        earlier_keys: keys of earlier shards, which are the first shards; None: computed by this run.
    """

    folder: Path
    preset: Preset
    groups: int
    ranges: int
    earlier_keys: tuple[Path | None, ...] = ()

    @property
    def columns(self) -> int:
        """Return the keys per document: one per band; the two halves of the hash for whole texts."""
        return 2 if self.preset.unit == "text" else self.preset.bands

    @property
    def ids(self) -> Path:
        return self.folder / "ids"

    @property
    def sets(self) -> Path:
        return self.folder / "sets"

    @property
    def firsts(self) -> Path:
        return self.folder / "firsts"

    @property
    def roots(self) -> Path:
        return self.folder / "roots"

    def keys(self, shard: int) -> Path:
        earlier_keys = self.earlier_keys[shard] if shard < len(self.earlier_keys) else None
        return earlier_keys or self.folder / "keys" / f"{shard:05d}"

    def has_earlier_keys(self, shard: int) -> bool:
        return shard < len(self.earlier_keys) and self.earlier_keys[shard] is not None

    @property
    def pair_flags(self) -> Path:
        return self.folder / "paired"

    @property
    def components(self) -> Path:
        return self.folder / "components"

    def run(self, group: int, run: int) -> Path:
        return self.folder / "sorted" / f"{group:05d}-{run:05d}"

    def run_sizes(self, group: int) -> Path:
        return self.folder / "sorted" / f"{group:05d}.runs"

    def shard_sizes(self, group: int) -> Path:
        return self.folder / "sorted" / f"{group:05d}.shards"

    def pairs(self, band: int, part: int) -> Path:
        return self.folder / "pairs" / f"{band:03d}-{part:05d}"

    def read_firsts(self) -> list[int]:
        """Read the number of each shard's first document, and the total."""
        firsts: list[int] = np.fromfile(self.firsts, "<u8").tolist()
        return firsts

    def read_runs(self) -> list[SortedRun]:
        """Read which runs of sorted keys there are, in the order of their documents."""
        runs = list[SortedRun]()
        first = 0
        has_checks = self.preset.unit == "text"
        for group in range(self.groups):
            for number, size in enumerate(np.fromfile(self.run_sizes(group), "<u8").tolist()):
                cells = count_cells(size, self.ranges)
                path = self.run(group, number)
                runs.append(SortedRun(path, first, size, self.preset.bands, cells, has_checks))
                first += size
        return runs

    def read_pairs(self) -> Iterator[NDArray[np.uint64]]:
        """Yield the pairs of all bands in blocks."""
        for band, part in product(range(self.preset.bands), range(self.ranges)):
            with self.pairs(band, part).open("rb") as file:
                while data := file.read(16 * BLOCK_PAIRS):
                    yield np.frombuffer(data, "<u8").reshape(-1, 2)


def locate(document: int, firsts: Sequence[int]) -> tuple[int, int]:
    """Return the shard of a document, and its place there."""
    shard = int(np.searchsorted(firsts, document, "right")) - 1
    return shard, document - firsts[shard]
