"""Speculated tokens by prompt lookup: what followed the last tokens when they came before in this sequence.

Text that repeats its prompt (summaries, code edits, tables) is drafted well. A draft changes the speed only:
it is kept where the sampler chooses the same token, and the draw at a position depends on nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence


class PromptLookup:
    """Index of the n-grams of one sequence, which grows with it.

    Args:
        min_ngram, max_ngram: lengths of the n-grams; a longer match is preferred.
    """

    __slots__ = ("_follower", "_indexed", "_sizes")

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._follower: dict[tuple[int, ...], int] = {}  # n-gram -> index after its last occurrence
        self._indexed = 0

    def draft(self, token_ids: Sequence[int], count: int) -> list[int]:
        """Return up to `count` tokens that may follow; none where the last tokens are new.

        Args:
            token_ids: all tokens of the sequence, those of earlier calls included.
        """
        for end in range(self._indexed + 1, len(token_ids)):
            for size in self._sizes:
                if size <= end:
                    self._follower[tuple(token_ids[end - size : end])] = end
        self._indexed = max(self._indexed, len(token_ids) - 1)
        for size in self._sizes:
            start = self._follower.get(tuple(token_ids[-size:]))
            if start is not None and size <= len(token_ids):
                draft = list(token_ids[start : start + count])
                period = len(token_ids) - start
                while len(draft) < count:  # the repetition goes on
                    draft.append(draft[-period])
                return draft
        return []
