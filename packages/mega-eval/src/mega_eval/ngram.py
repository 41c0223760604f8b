"""N-gram language models, counted on a training stream, as baselines for a neural network.

Symbols: V vocabulary size, c(v w) count of the pair v w, N number of tokens in the stream.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mega_eval.windows import Tokens

Logprobs = npt.NDArray[np.float64]


class Unigram:
    """Frequency of each token with add-one smoothing: P(w) = (c(w) + 1) / (N + V)."""

    def __init__(self, stream: Tokens, vocab_size: int) -> None:
        counts = np.bincount(stream, minlength=vocab_size)
        self._logprobs = np.log((counts + 1.0) / (len(stream) + vocab_size))

    def score(self, tokens: Tokens) -> Logprobs:
        """Return ln P(w) of each token, (n,)."""
        return self._logprobs[tokens]


class KneserNey:
    """Interpolated Kneser-Ney bigram model with one discount (Chen and Goodman 1999, section 2.7).

    P(w | v) = max(c(v w) - D, 0) / c(v) + D F(v) / c(v) * Q(w)
    Q(w)     = max(P(w) - D, 0) / B + D K / B * 1 / V

    F(v) is the number of distinct tokens after v, P(w) of distinct tokens before w, K of tokens with at least
    one token before them, and B of distinct pairs. D = n1 / (n1 + 2 n2), with n1 and n2 the number of pairs
    that occur once and twice. After a token that is not in the stream, P(w | v) = Q(w). Every conditional
    distribution sums to 1 over the vocabulary.
    """

    def __init__(self, stream: Tokens, vocab_size: int) -> None:
        """Count the pairs of a stream of at least two tokens, each in [0, vocab_size)."""
        assert len(stream) > 1, "no pairs to count"
        self._vocab_size = vocab_size
        self._pairs, counts = np.unique(stream[:-1] * vocab_size + stream[1:], return_counts=True)
        singletons = int((counts == 1).sum())
        doubletons = int((counts == 2).sum())
        # without singletons the estimate is 0, which would give every unseen pair probability 0
        self.discount = singletons / (singletons + 2 * doubletons) if singletons else 0.5
        self._pair_counts = counts.astype(np.float64)
        first, second = np.divmod(self._pairs, vocab_size)
        self._context_counts = np.bincount(first, weights=self._pair_counts, minlength=vocab_size)
        self._followers = np.bincount(first, minlength=vocab_size).astype(np.float64)
        preceders = np.bincount(second, minlength=vocab_size).astype(np.float64)
        uniform = self.discount * np.count_nonzero(preceders) / len(self._pairs) / vocab_size
        self._continuation = np.maximum(preceders - self.discount, 0.0) / len(self._pairs) + uniform

    def score(self, contexts: Tokens, tokens: Tokens) -> Logprobs:
        """Return ln P(w | v) of each token w after the context token v at the same index, (n,)."""
        pairs = contexts * self._vocab_size + tokens
        indices = np.minimum(np.searchsorted(self._pairs, pairs), len(self._pairs) - 1)
        pair_counts = np.where(self._pairs[indices] == pairs, self._pair_counts[indices], 0.0)
        context_counts = self._context_counts[contexts]
        in_stream = context_counts > 0
        divisor = np.where(in_stream, context_counts, 1.0)
        backoff = np.where(in_stream, self.discount * self._followers[contexts] / divisor, 1.0)
        discounted = np.maximum(pair_counts - self.discount, 0.0) / divisor
        return np.asarray(np.log(discounted + backoff * self._continuation[tokens]))
