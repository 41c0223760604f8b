"""Format metrics for a reader, equally in all tables and pages."""

from __future__ import annotations

from typing import Literal

_LARGE = 1e9  # the perplexity of a model that learned nothing may have 300 digits


def format_number(value: float, sign: Literal["", "+"] = "") -> str:
    """Format a number with four decimals, a very large one in scientific notation.

    Args:
        sign: "+" also writes the sign of positive numbers.
    """
    return f"{value:{sign},.4f}" if abs(value) < _LARGE else f"{value:{sign}.4e}"


def can_detect(value: float, detectable: float, *, higher_is_better: bool | None) -> bool:
    """Return whether another result can differ from `value` by the smallest difference that is detected.

    A metric for which higher is better ends at 1, such as an accuracy; all others end at 0, such as a loss.
    """
    largest = max(abs(value), 1 - value) if higher_is_better else abs(value)
    return detectable <= largest
