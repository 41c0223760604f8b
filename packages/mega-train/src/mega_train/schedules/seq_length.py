"""How many tokens of a sample a step reads: few at first (arXiv:2108.06084), as DeepSpeed schedules it."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SeqLengthSchedule:
    """Tokens of a sample, by step. What of a sample lies behind them is left out.

    Attributes:
        full: in the end, and in validations.
        start, steps: the length begins at `start` and is `full` from step `steps` on; 0 for one that never
            changes.
        multiple: lengths on the way are multiples of this.
        root: the share of the way that is done is that of the steps, to the power 1 / root.
    """

    full: int
    start: int = 0
    steps: int = 0
    multiple: int = 1
    root: float = 1.0

    def length_at(self, step: int) -> int:
        """Of this step, counted from 1."""
        if step >= self.steps:
            return self.full
        growth = math.floor((step / self.steps) ** (1 / self.root) * (self.full - self.start))
        return max(self.start, (self.start + growth) // self.multiple * self.multiple)

    @property
    def all_lengths(self) -> list[int]:
        """Every length there may be."""
        if not self.steps:
            return [self.full]
        second = (self.start // self.multiple + 1) * self.multiple
        return [self.start, *range(second, self.full, self.multiple), self.full]
