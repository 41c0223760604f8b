"""Format counts for messages."""

from __future__ import annotations


def format_count(count: int, singular: str, plural: str = "") -> str:
    """Return a count with its noun: "1 line", "2,000 lines".

    Args:
        singular: noun, or noun and verb, of one.
        plural: of other counts; "" appends an s.
    """
    return f"{count:,} {singular if count == 1 else plural or f'{singular}s'}"
