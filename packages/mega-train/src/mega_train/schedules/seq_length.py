"""Sequence-length curriculum: short samples first (arXiv:2108.06084), with DeepSpeed's schedules."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SeqLengthSchedule:
    """Tokens of a sample by step. The rest of a sample is not read.

    Attributes:
        full: the final length, also used in validations.
        start, steps: the length starts at `start` and is `full` from step `steps` on; 0 steps keep it
            constant.
        multiple: lengths in between are multiples of this.
        root: the length grows with the fraction of the steps to the power 1 / root.
    """

    full: int
    start: int = 0
    steps: int = 0
    multiple: int = 1
    root: float = 1.0

    def length_at(self, step: int) -> int:
        """Return the length of this step, counted from 1."""
        if step >= self.steps:
            return self.full
        growth = math.floor((step / self.steps) ** (1 / self.root) * (self.full - self.start))
        return max(self.start, (self.start + growth) // self.multiple * self.multiple)

    @property
    def all_lengths(self) -> list[int]:
        """All possible lengths."""
        if not self.steps:
            return [self.full]
        second = (self.start // self.multiple + 1) * self.multiple
        return [self.start, *range(second, self.full, self.multiple), self.full]
