"""Presets of deduplication: two public recipes and exact equality.

With rows r and bands b, two documents of Jaccard similarity s share a band with probability 1 - (1 - s^r)^b.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal


@dataclass(frozen=True, slots=True)
class Preset:
    """The parameters of shingling, comparison and grouping of documents.

    Attributes:
        unit: unit of a shingle; "text" is the whole text, compared by a 128-bit hash.
        size: units in a shingle.
        bands: groups of signature values; documents that agree on all values of a group become a pair.
        rows: signature values in a band.
        jaccard: minimum Jaccard similarity of a pair's shingle sets; None accepts every pair.
    """

    unit: Literal["characters", "words", "text"]
    size: int
    bands: int
    rows: int
    jaccard: float | None = None
    seed: int = 1234

    @property
    def bins(self) -> int:
        """Return the number of values in a signature."""
        return self.bands * self.rows


PRESETS = MappingProxyType(
    {
        # tools/openwebtext: find_duplicates.py's 5-character shingles, 100 seeds in 10 bands, checked by
        # Jaccard; group_duplicate_url.py's 0.7
        "megatron": Preset("characters", 5, bands=10, rows=10, jaccard=0.7),
        # datatrove's MinhashConfig, which FineWeb used: 5 words, 14 bands of 8, no check
        "datatrove": Preset("words", 5, bands=14, rows=8, seed=1),
        "exact": Preset("text", 1, bands=1, rows=1),
    }
)
