"""Tokens per second over the last seconds."""

from __future__ import annotations

from collections import deque

_WINDOW_SECONDS = 10.0


class Throughput:
    """Rate of generated tokens over the last ten seconds.

    Args:
        now: the time at which the engine starts.
    """

    def __init__(self, now: float) -> None:
        self._start = now
        self._steps: deque[tuple[float, int]] = deque()  # time and tokens
        self._tokens = 0

    def add(self, now: float, tokens: int) -> None:
        """Count the tokens of a step."""
        if tokens:
            self._steps.append((now, tokens))
            self._tokens += tokens
        while self._steps and self._steps[0][0] <= now - _WINDOW_SECONDS:
            self._tokens -= self._steps.popleft()[1]

    def tokens_per_second(self, now: float) -> float:
        """Return the rate; 0 before the first token."""
        self.add(now, 0)
        elapsed = min(_WINDOW_SECONDS, now - self._start)
        return self._tokens / elapsed if elapsed > 0.0 else 0.0
