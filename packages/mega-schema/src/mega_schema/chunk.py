"""How much of what is too large to be there at once is there: said here for who computes and who plans."""

from __future__ import annotations

FEWEST = 256  # tokens: with fewer a matrix product is not worth its call
_MULTIPLE = 128  # of which products like their tokens: a CPU takes a third longer for each of 682 than of 640


def loss_tokens(width: int, itemsize: int) -> int:
    """Tokens whose logits exist at once: these take half the room of its float32 gradient, or are FEWEST.

    Args:
        width: of what the head multiplies.
        itemsize: bytes of a logit.
    """
    return max(FEWEST, 2 * width // itemsize // _MULTIPLE * _MULTIPLE)


def loss_chunk(tokens: int, most: int) -> int:
    """Tokens of each chunk but the last: `most` or fewer, in chunks of much the same size."""
    even = -(-tokens // -(-tokens // most))
    return min(tokens, most, -(-even // _MULTIPLE) * _MULTIPLE)
