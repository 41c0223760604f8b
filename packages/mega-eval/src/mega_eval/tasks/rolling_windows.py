"""The windows in which lm-evaluation-harness scores a whole text (`loglikelihood_rolling`)."""

from __future__ import annotations

from collections.abc import Sequence

from mega_eval.windows import Window, as_tokens


def rolling_windows(ids: Sequence[int], prefix_id: int, length: int) -> list[Window]:
    """Cut a text into windows whose targets are disjoint and cover every token.

    The first token is predicted from the prefix token. Each window but the last predicts `length` tokens,
    the first of them from one token; the last predicts the rest, each from a whole window of tokens before
    it, if the text is that long.

    Args:
        length: tokens the model can read.
    """
    first = min(length, len(ids))
    windows = [Window(as_tokens([prefix_id, *ids[:first]]), first)] if first else []
    for start in range(first, len(ids), length):
        end = min(start + length, len(ids))
        windows.append(Window(as_tokens(ids[end - length - 1 : end]), end - start))
    return windows
