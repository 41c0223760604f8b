"""Windows: the pieces of text a model is asked about, and the order in which it is asked.

Everything a task scores is a `Window`: some tokens, the last few of which are to be predicted. That covers a
LAMBADA passage (its last word) and a slice of a long stream (the tokens the window before did not reach).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens of which the last `scored` are predicted, each from all tokens before it.

    Attributes:
        tokens: (n + 1,) ids. The model reads the first n and predicts the last n.
        scored: how many of those predictions count, 0 to n; the rest is context.
    """

    tokens: Tokens
    scored: int

    def __post_init__(self) -> None:
        assert 0 <= self.scored <= self.read, (
            f"{self.scored} targets in a window that reads {self.read} tokens"
        )

    @property
    def read(self) -> int:
        """Tokens the model reads."""
        return max(len(self.tokens) - 1, 0)


def ids(tokens: Sequence[int] | npt.NDArray[Any]) -> Tokens:
    """The ids as one array, whatever held them."""
    return np.asarray(tokens, dtype=np.int64)


def ending(context: Sequence[int], target: Sequence[int], longest: int) -> tuple[Window, bool]:
    """A window that predicts `target` from as much of the end of `context` as fits.

    Args:
        longest: tokens the model can read; the window keeps the last `longest` + 1.

    Returns:
        The window, and whether anything was cut away. A target that fills the whole window loses its first
        tokens too, since they would have nothing before them.
    """
    whole = [*context, *target]
    kept = whole[-(longest + 1) :]
    return Window(ids(kept), min(len(target), len(kept) - 1)), len(kept) < len(whole)


def sliding(stream: Tokens, length: int, stride: int) -> list[Window]:
    """The windows Megatron lays over a stream of tokens for WIKITEXT103.

    Window i reads `length` tokens from token i x `stride` on. The first one scores everything, the others
    only their last `stride` positions, so with `stride` <= `length` every token but the first is scored
    exactly once, and after the first window each with at least `length` - `stride` tokens before it.

    Windows near the end of the stream can have nothing left to score: they are Megatron's too, and a scorer
    skips them.
    """
    last = len(stream) - 1
    count = 1 + max(0, -(-(last - stride) // stride))
    windows = []
    for number in range(count):
        tokens = stream[number * stride : number * stride + length + 1]
        real = max(len(tokens) - 1, 0)
        scored = real if number == 0 else max(0, min(real, real - length + stride))
        windows.append(Window(tokens, scored))
    return windows


def batches(windows: Sequence[Window], rows: int) -> list[list[int]]:
    """The numbers of the windows that have something to score, at most `rows` to a batch, longest first.

    Windows of like length share a batch, so that little is padded; the longest go first, so that a batch that
    does not fit in memory says so at once.
    """
    order = sorted((n for n, w in enumerate(windows) if w.scored), key=lambda n: (-windows[n].read, n))
    return [order[at : at + rows] for at in range(0, len(order), rows)]
