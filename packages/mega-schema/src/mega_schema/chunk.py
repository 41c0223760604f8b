"""How much of what is too large to be there at once is there: said here for who computes and who plans."""

from __future__ import annotations

FEWEST = 256  # tokens: with fewer a matrix product is not worth its call


def loss_tokens(width: int, itemsize: int) -> int:
    """Tokens whose logits exist at once: these take no more than the head's float32 gradient, which does too.

    Args:
        width: of what the head multiplies.
        itemsize: bytes of a logit.
    """
    return max(FEWEST, 4 * width // itemsize)
