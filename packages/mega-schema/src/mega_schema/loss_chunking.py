"""The size of the chunks in which a head computes its loss: one rule for the model and for the planner."""

from __future__ import annotations

MIN_TOKENS = 256  # tokens: with fewer a matrix product is not worth its call
_MULTIPLE = 128  # of which products like their tokens: a CPU takes a third longer for each of 682 than of 640


def max_chunk_tokens(width: int, itemsize: int) -> int:
    """Tokens of a chunk: their logits take half the memory of the head's float32 gradient; FEWEST at least.

    Args:
        width: of what the head multiplies.
        itemsize: bytes of a logit.
    """
    return max(MIN_TOKENS, 2 * width // itemsize // _MULTIPLE * _MULTIPLE)


def chunk_tokens(tokens: int, max_tokens: int) -> int:
    """Tokens of each chunk but the last: `most` or fewer, in chunks of much the same size."""
    even = -(-tokens // -(-tokens // max_tokens))
    return min(tokens, max_tokens, -(-even // _MULTIPLE) * _MULTIPLE)
