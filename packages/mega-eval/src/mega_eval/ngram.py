"""Language models made by counting: what a network has to beat to have learned anything.

Symbols: V vocabulary, c(v w) how often token w follows token v, N the tokens counted.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mega_eval.windows import Tokens

Floats = npt.NDArray[np.float64]


class Unigram:
    """How common each token is, with one added to every count: (c(w) + 1) / (N + V)."""

    def __init__(self, stream: Tokens, vocab: int) -> None:
        self._log = np.log((np.bincount(stream, minlength=vocab) + 1.0) / (len(stream) + vocab))

    def score(self, tokens: Tokens) -> Floats:
        """ln P(w) of each token, (n,)."""
        return self._log[tokens]


class KneserNey:
    """Interpolated Kneser-Ney bigrams with one discount (Chen and Goodman 1999, section 2.7).

    P(w | v) = max(c(v w) - D, 0) / c(v) + D F(v) / c(v) * Q(w)
    Q(w)     = max(P(w) - D, 0) / B + D K / B * 1 / V

    F(v) is the number of different tokens after v, P(w) of different tokens before w, K of tokens with any
    before them, and B of different pairs. D = n1 / (n1 + 2 n2), with n1 and n2 the pairs seen once and twice.
    After a token never seen, P(w | v) = Q(w). Every conditional sums to 1 over the vocabulary.
    """

    def __init__(self, stream: Tokens, vocab: int) -> None:
        """Count the pairs of a stream: two tokens or more, each in [0, vocab)."""
        assert len(stream) > 1, "no pairs to count"
        self._vocab = vocab
        self._pairs, counts = np.unique(stream[:-1] * vocab + stream[1:], return_counts=True)
        once, twice = int((counts == 1).sum()), int((counts == 2).sum())
        # with no pair seen once the estimate is 0, which would call every new pair impossible
        self.discount = once / (once + 2 * twice) if once else 0.5
        self._counts = counts.astype(np.float64)
        before, after = np.divmod(self._pairs, vocab)
        self._contexts = np.bincount(before, weights=self._counts, minlength=vocab)
        self._followers = np.bincount(before, minlength=vocab).astype(np.float64)
        preceders = np.bincount(after, minlength=vocab).astype(np.float64)
        left_over = self.discount * np.count_nonzero(preceders) / len(self._pairs) / vocab
        self._continuation = np.maximum(preceders - self.discount, 0.0) / len(self._pairs) + left_over

    def score(self, before: Tokens, tokens: Tokens) -> Floats:
        """ln P(w | v) of each token after the one before it, (n,)."""
        wanted = before * self._vocab + tokens
        at = np.minimum(np.searchsorted(self._pairs, wanted), len(self._pairs) - 1)
        pair = np.where(self._pairs[at] == wanted, self._counts[at], 0.0)
        total = self._contexts[before]
        known = total > 0
        divisor = np.where(known, total, 1.0)
        share = np.where(known, self.discount * self._followers[before] / divisor, 1.0)
        return np.asarray(
            np.log(np.maximum(pair - self.discount, 0.0) / divisor + share * self._continuation[tokens])
        )
