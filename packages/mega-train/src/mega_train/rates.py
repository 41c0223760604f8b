"""The learning rate's course, in samples, as Megatron computes it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Style = Literal["constant", "linear", "cosine", "inverse-square-root"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRate:
    """The rate after `samples` samples; the first step uses that of 0 samples.

    Attributes:
        warmup, decay: in samples, from the start of training.
    """

    peak: float
    least: float
    warmup: float
    decay: int
    style: Style

    def at(self, samples: int) -> float:
        if self.warmup > 0 and samples <= self.warmup:
            return self.peak * samples / self.warmup
        if self.style == "constant":
            return self.peak
        if samples > self.decay:
            return self.least
        if self.style == "inverse-square-root":
            return max(self.least, self.peak * max(self.warmup, 1) ** 0.5 / max(samples, 1) ** 0.5)
        done = (samples - self.warmup) / (self.decay - self.warmup)
        left = 1.0 - done if self.style == "linear" else 0.5 * (math.cos(math.pi * done) + 1.0)
        return self.least + left * (self.peak - self.least)
