"""The most frequent values of a stream in bounded memory: a mergeable Misra-Gries summary.

Counts are exact while there are at most CAPACITY different values. Beyond, each count may be too low by at
most `error`, which is at most the number of values divided by CAPACITY (Agarwal et al., Mergeable Summaries,
2012). So a value that is more frequent than `error` is never missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

CAPACITY: Final = 20_000


@dataclass(slots=True)
class FrequentValues:
    """Counts of the frequent values.

    Attributes:
        total: values, also those that are not in `counts`.
        error: maximum by which a count is too low.
    """

    capacity: int = CAPACITY
    total: int = 0
    error: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, value: str) -> None:
        """Count a value."""
        self.total += 1
        self.counts[value] += 1
        if len(self.counts) > 2 * self.capacity:  # not for each value: a reduction reads all counts
            self._reduce()

    def merge(self, values: Mapping[str, Any]) -> None:
        """Add the counts of a `to_dict`."""
        self.total += values["total"]
        self.error += values["error"]
        self.counts.update(values["counts"])
        self._reduce()

    def _reduce(self) -> None:
        """Subtract from each count the largest that must go, and drop those at 0."""
        if len(self.counts) <= self.capacity:
            return
        excess = sorted(self.counts.values(), reverse=True)[self.capacity]
        self.counts = Counter({v: count - excess for v, count in self.counts.items() if count > excess})
        self.error += excess

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON values, in the order of the values."""
        self._reduce()
        return {"total": self.total, "error": self.error, "counts": dict(sorted(self.counts.items()))}

    @classmethod
    def sum_of(cls, parts: Iterable[Mapping[str, Any]], capacity: int = CAPACITY) -> Self:
        """Add up the counts of `to_dict`s; the result depends on their order only if it is not exact."""
        total = cls(capacity)
        for values in parts:
            total.merge(values)
        return total

    def summary(self, top: int) -> dict[str, Any]:
        """Return the most frequent values with their counts.

        Args:
            top: maximum number of values.
        """
        ranked = sorted(self.counts.items(), key=lambda item: (-item[1], item[0]))
        different = None if self.error else len(self.counts)
        return {"total": self.total, "different": different, "error": self.error, "top": dict(ranked[:top])}
