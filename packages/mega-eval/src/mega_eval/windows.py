"""Windows of tokens that a model scores.

A task turns its data into `Window`s: tokens of which the last few are targets. A LAMBADA passage is a window
whose target is the last word. A long text is a sequence of windows that overlap, and the targets of each are
the tokens that no earlier window has scored.
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
    """Tokens of which the last `target_length` are predicted, each from all tokens before it.

    Attributes:
        tokens: (n + 1,) ids. The model reads the first n and predicts the last n.
        target_length: how many of the predictions are scored, 0 to n; the tokens before are context.
    """

    tokens: Tokens
    target_length: int

    def __post_init__(self) -> None:
        assert 0 <= self.target_length <= self.input_length, (
            f"{self.target_length} targets in a window that reads {self.input_length} tokens"
        )

    @property
    def input_length(self) -> int:
        """Number of tokens that the model reads."""
        return max(len(self.tokens) - 1, 0)

    @property
    def targets(self) -> Tokens:
        """(target_length,) the ids that are predicted."""
        return self.tokens[len(self.tokens) - self.target_length :]


def as_tokens(ids: Sequence[int] | npt.NDArray[Any]) -> Tokens:
    """Convert ids to one array of 64-bit integers."""
    return np.asarray(ids, dtype=np.int64)


def suffix_window(context: Sequence[int], target: Sequence[int], max_length: int) -> tuple[Window, bool]:
    """Build a window that predicts `target` from the end of `context`, truncated to `max_length`.

    Args:
        max_length: tokens the model can read; the window keeps the last `max_length` + 1.

    Returns:
        The window, and whether it was truncated. A target that fills the whole window loses its first tokens
        too, because no token would come before them.
    """
    tokens = [*context, *target]
    suffix = tokens[-(max_length + 1) :]
    window = Window(as_tokens(suffix), min(len(target), len(suffix) - 1))
    return window, len(suffix) < len(tokens)


def sliding_windows(stream: Tokens, length: int, stride: int) -> list[Window]:
    """Cut a stream of tokens into overlapping windows, as Megatron's WIKITEXT103 task does.

    Window i reads `length` tokens from token i x `stride` on. The first window scores all its predictions,
    the others only the last `stride`. With `stride` <= `length`, every token but the first is scored exactly
    once, and after the first window each target has at least `length` - `stride` tokens before it.

    Like Megatron's, the last windows may have no targets; a scorer skips them.
    """
    last = len(stream) - 1
    count = 1 + max(0, -(-(last - stride) // stride))
    windows = []
    for number in range(count):
        tokens = stream[number * stride : number * stride + length + 1]
        inputs = max(len(tokens) - 1, 0)
        targets = inputs if number == 0 else max(0, min(inputs, inputs - length + stride))
        windows.append(Window(tokens, targets))
    return windows
