"""Batch-size ramp-up: samples of a step as a function of the consumed samples, as in Megatron."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchSizeRampup:
    """Samples of a step over all ranks.

    Attributes:
        full: the final size, also used in validations.
        start, increment, ramp: the size starts at `start` and grows by `increment` up to `full`, each size
            for an equal part of the first `ramp` samples; a ramp of 0 keeps the size constant.
        multiple: every size is rounded down to a multiple of this.
    """

    full: int
    start: int = 0
    increment: int = 0
    ramp: int = 0
    multiple: int = 1

    def size_at(self, consumed_samples: int) -> int:
        """Return the samples of the step that starts after `consumed_samples` samples."""
        size = self.full
        if self.ramp and consumed_samples <= self.ramp:
            samples_per_size = self.ramp / ((self.full - self.start) // self.increment)
            size = self.start + int(consumed_samples / samples_per_size) * self.increment
        return size // self.multiple * self.multiple

    @property
    def sizes(self) -> list[int]:
        """All sizes in order, before rounding."""
        return [*range(self.start, self.full, self.increment), self.full] if self.ramp else [self.full]

    def steps(self, samples: int) -> int:
        """Count the complete steps of the first `samples` samples."""
        steps, consumed_samples = 0, 0
        for consumed_samples in self._ramp_steps(0):
            steps += 1
            if consumed_samples > samples:
                return steps  # Megatron's: the ramp's last step may pass the end
        return steps + max(0, samples - consumed_samples) // self.size_at(self.ramp + 1)

    def samples_after(self, consumed_samples: int, steps: int) -> int:
        """Return the consumed samples after `steps` further steps."""
        for next_consumed in self._ramp_steps(consumed_samples):
            if steps == 0:
                return consumed_samples
            consumed_samples = next_consumed
            steps -= 1
        return consumed_samples + steps * self.size_at(self.ramp + 1)

    def _ramp_steps(self, consumed_samples: int) -> Iterator[int]:
        """Yield the consumed samples after each step that starts on the ramp."""
        while self.ramp and consumed_samples <= self.ramp:
            consumed_samples += self.size_at(consumed_samples)
            yield consumed_samples
