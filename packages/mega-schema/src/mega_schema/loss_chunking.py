"""Chunk size of the logits in the loss. Shared by the model, which computes with it, and the planner."""

from __future__ import annotations

MIN_TOKENS = 256  # with fewer, the overhead of a matrix product dominates
_MULTIPLE = 128  # tokens of fast products: a CPU takes a third longer per token for 682 than for 640


def max_chunk_tokens(width: int, itemsize: int) -> int:
    """Return the maximum tokens of a chunk: their logits take half the memory of the head's float32 gradient.

    At least MIN_TOKENS.

    Args:
        width: hidden size, the input of the head.
        itemsize: bytes of a logit.
    """
    return max(MIN_TOKENS, 2 * width // itemsize // _MULTIPLE * _MULTIPLE)


def chunk_tokens(tokens: int, max_tokens: int) -> int:
    """Return the tokens of each chunk but the last: at most `max_tokens`, in chunks of similar size."""
    even = -(-tokens // -(-tokens // max_tokens))
    return min(tokens, max_tokens, -(-even // _MULTIPLE) * _MULTIPLE)
