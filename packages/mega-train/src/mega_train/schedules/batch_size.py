"""How many samples an optimizer step takes: a function of how many the run has consumed, as Megatron's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchSizes:
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

    def at(self, consumed: int) -> int:
        """Samples of the step that begins when so many were consumed."""
        size = self.full
        if self.ramp and consumed <= self.ramp:
            each = self.ramp / ((self.full - self.start) // self.increment)
            size = self.start + int(consumed / each) * self.increment
        return size // self.multiple * self.multiple

    @property
    def sizes(self) -> list[int]:
        """Every size there will be, in their order, before they are rounded."""
        return [*range(self.start, self.full, self.increment), self.full] if self.ramp else [self.full]

    def steps(self, samples: int) -> int:
        """Whole steps that so many samples are enough for, from the start."""
        steps, consumed = 0, 0
        for consumed in self._ramped(0):
            steps += 1
            if consumed > samples:
                return steps  # Megatron's: the ramp's last step may pass the end
        return steps + max(0, samples - consumed) // self.at(self.ramp + 1)

    def after(self, consumed: int, steps: int) -> int:
        """Samples consumed when so many steps more are done."""
        for reached in self._ramped(consumed):
            if steps == 0:
                return consumed
            consumed, steps = reached, steps - 1
        return consumed + steps * self.at(self.ramp + 1)

    def _ramped(self, consumed: int) -> Iterator[int]:
        """Samples consumed after each step that begins on the ramp."""
        while self.ramp and consumed <= self.ramp:
            consumed += self.at(consumed)
            yield consumed
