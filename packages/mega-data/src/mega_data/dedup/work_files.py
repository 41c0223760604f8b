"""The files that the stages of a deduplication exchange in its work folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mega_data.dedup.presets import Preset

BLOCK_PAIRS = 1 << 16  # read or written at once


@dataclass(frozen=True, slots=True)
class WorkFiles:
    """The files that the stages of a deduplication exchange in its work folder."""

    folder: Path
    preset: Preset

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
        return self.folder / "keys" / f"{shard:05d}"

    def pair_flags(self, band: int) -> Path:
        return self.folder / "paired" / f"{band:03d}"

    def pairs(self, band: int) -> Path:
        return self.folder / "pairs" / f"{band:03d}"

    def read_firsts(self) -> list[int]:
        """Read the number of each shard's first document, and the total."""
        firsts: list[int] = np.fromfile(self.firsts, "<u8").tolist()
        return firsts

    def read_pairs(self) -> Iterator[NDArray[np.uint64]]:
        """Yield the pairs of all bands in blocks."""
        for band in range(self.preset.bands):
            with self.pairs(band).open("rb") as file:
                while data := file.read(16 * BLOCK_PAIRS):
                    yield np.frombuffer(data, "<u8").reshape(-1, 2)


def locate(document: int, firsts: Sequence[int]) -> tuple[int, int]:
    """Return the shard of a document, and its place there."""
    shard = int(np.searchsorted(firsts, document, "right")) - 1
    return shard, document - firsts[shard]
