"""How many samples an optimizer step takes: a function of how many the run has consumed, as Megatron's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchSizeRampup:
    """Samples of a step, of all ranks together.

    Attributes:
        full: in the end, and in validations.
        start, increment, ramp: the size begins at `start` and grows by `increment` until `full` is reached,
            each size for as many of the first `ramp` samples as any other; 0 for a size that never changes.
        multiple: what every size is rounded down to a multiple of.
    """

    full: int
    start: int = 0
    increment: int = 0
    ramp: int = 0
    multiple: int = 1

    def size_at(self, consumed_samples: int) -> int:
        """Samples of the step that begins when so many were consumed."""
        size = self.full
        if self.ramp and consumed_samples <= self.ramp:
            samples_per_size = self.ramp / ((self.full - self.start) // self.increment)
            size = self.start + int(consumed_samples / samples_per_size) * self.increment
        return size // self.multiple * self.multiple

    @property
    def sizes(self) -> list[int]:
        """Every size there will be, in their order, before they are rounded."""
        return [*range(self.start, self.full, self.increment), self.full] if self.ramp else [self.full]

    def steps(self, samples: int) -> int:
        """Whole steps that so many samples are enough for, from the start."""
        steps, consumed_samples = 0, 0
        for consumed_samples in self._ramp_steps(0):
            steps += 1
            if consumed_samples > samples:
                return steps  # Megatron's: the ramp's last step may pass the end
        return steps + max(0, samples - consumed_samples) // self.size_at(self.ramp + 1)

    def samples_after(self, consumed_samples: int, steps: int) -> int:
        """Samples consumed when so many steps more are done."""
        for next_consumed in self._ramp_steps(consumed_samples):
            if steps == 0:
                return consumed_samples
            consumed_samples, steps = next_consumed, steps - 1
        return consumed_samples + steps * self.size_at(self.ramp + 1)

    def _ramp_steps(self, consumed_samples: int) -> Iterator[int]:
        """Samples consumed after each step that begins on the ramp."""
        while self.ramp and consumed_samples <= self.ramp:
            consumed_samples += self.size_at(consumed_samples)
            yield consumed_samples
