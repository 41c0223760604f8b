"""Counts of numbers in logarithmic bins, four for each doubling."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

_STEPS: Final = 4  # bins for each doubling
_DOUBLINGS: Final = 48
EDGES: Final = tuple(sorted({0, *(round(2 ** (k / _STEPS)) for k in range(_DOUBLINGS * _STEPS + 1))}))
PERCENTILES: Final = (5, 25, 50, 75, 95, 99)


@dataclass(slots=True)
class LengthBins:
    """Numbers from 0 on. Count, sum, minimum and maximum are exact, percentiles to a bin.

    Attributes:
        bins: how many numbers are in the bin of this number, `EDGES[bin]` to `EDGES[bin + 1]` - 1.
    """

    count: int = 0
    total: int = 0
    minimum: int = 0
    maximum: int = 0
    bins: Counter[int] = field(default_factory=Counter)

    def add(self, number: int, times: int = 1) -> None:
        """Count a number."""
        self._add_range(times, number * times, number, number)
        self.bins[bisect_right(EDGES, number) - 1] += times

    def merge(self, values: Mapping[str, Any]) -> None:
        """Add the counts of a `to_dict`."""
        if values["count"]:
            self._add_range(*(values[name] for name in ("count", "total", "minimum", "maximum")))
            self.bins.update({int(number): count for number, count in values["bins"].items()})

    def _add_range(self, count: int, total: int, minimum: int, maximum: int) -> None:
        self.minimum = min(self.minimum, minimum) if self.count else minimum
        self.maximum = max(self.maximum, maximum)
        self.count += count
        self.total += total

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON values."""
        bins = {str(number): self.bins[number] for number in sorted(self.bins)}
        names = ("count", "total", "minimum", "maximum")
        return {**{name: getattr(self, name) for name in names}, "bins": bins}

    @classmethod
    def sum_of(cls, parts: Iterable[Mapping[str, Any]]) -> Self:
        """Add up the counts of `to_dict`s."""
        total = cls()
        for values in parts:
            total.merge(values)
        return total

    def percentile(self, percent: float) -> int:
        """Return the largest number of the bin in which this percentile is; at most the maximum."""
        rank = percent / 100 * self.count
        below = 0
        for number in sorted(self.bins):
            below += self.bins[number]
            if below >= rank:
                return min(self.maximum, EDGES[number + 1] - 1)
        return self.maximum

    def summary(self) -> dict[str, Any]:
        """Return the counts, with mean, percentiles and the edges of the bins that are not empty."""
        return {
            "count": self.count,
            "total": self.total,
            "mean": self.total / self.count if self.count else 0.0,
            "minimum": self.minimum,
            "maximum": self.maximum,
            "percentiles": {str(percent): self.percentile(percent) for percent in PERCENTILES},
            "histogram": [
                {"from": EDGES[number], "to": EDGES[number + 1] - 1, "count": self.bins[number]}
                for number in sorted(self.bins)
            ],
        }
