"""Count the steps of the model by their numbers of tokens."""

from __future__ import annotations

from bisect import bisect_left

# upper bounds of the buckets, vLLM's; one more bucket counts larger steps
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class StepSizes:
    """A histogram of the tokens that a step computes, those of prompts and drafts included.

    Attributes:
        tokens: of all steps.
    """

    def __init__(self) -> None:
        self._counts = [0] * (len(STEP_TOKENS) + 1)
        self.tokens = 0

    @property
    def counts(self) -> tuple[int, ...]:
        """Steps in each bucket."""
        return tuple(self._counts)

    def add(self, tokens: int) -> None:
        """Count a step."""
        self._counts[bisect_left(STEP_TOKENS, tokens)] += 1
        self.tokens += tokens
