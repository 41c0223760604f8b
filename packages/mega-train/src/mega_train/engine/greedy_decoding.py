"""Greedy decoding by forward passes over whole texts, so that every parallel layout of training can decode.

A pass predicts the token after every prefix of a guess. The predictions are right up to and including the
first that differs from the guess; they become the next guess (Jacobi iteration, arXiv:2305.10427). The result
is that of decoding token by token. A guess that is right costs one pass, and any guess at most one pass for
each token.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def decode_greedily(
    next_tokens: Callable[[Ints], Ints], guess_BL: Ints, *, start: int, end: int, width: int
) -> list[list[int]]:
    """Decode the rows of a batch.

    Args:
        next_tokens: predicts (B, W) the token after every prefix of (B, W) decoder inputs.
        guess_BL: guessed outputs; L is the maximum number of tokens of an output.
        start, end: the first token of the input, and the token that ends an output.
        width: tokens of the first pass; it doubles as long as an output does not fit.

    Returns:
        the outputs, without the end token.
    """
    output_BL = guess_BL.copy()
    rows, limit = output_BL.shape
    width = max(1, min(width, limit))
    known_B = np.zeros(rows, np.int64)  # tokens of each output that are final
    while True:
        begin_B1 = np.full((rows, 1), start)
        predicted_BW = next_tokens(np.concatenate([begin_B1, output_BL[:, : width - 1]], 1))
        is_known_BW = np.arange(width) < known_B[:, None]
        # rounding can differ between widths; a token that is final stays
        predicted_BW = np.where(is_known_BW, output_BL[:, :width], predicted_BW)
        differs_BW = predicted_BW != output_BL[:, :width]
        matches_B = np.where(differs_BW.any(1), differs_BW.argmax(1), width)
        known_B = np.minimum(matches_B + 1, width)
        output_BL[:, :width] = predicted_BW
        has_end_B = ((predicted_BW == end) & (np.arange(width) < known_B[:, None])).any(1)
        is_open_B = ~has_end_B & (known_B < limit)
        if not is_open_B.any():
            return [_cut(row, end) for row in output_BL.tolist()]
        if (is_open_B & (known_B == width)).any():
            width = min(2 * width, limit)


def _cut(tokens: list[int], end: int) -> list[int]:
    return tokens[: tokens.index(end)] if end in tokens else tokens
