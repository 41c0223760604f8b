"""Sample the next token of every row of a batch, each row with parameters of its own.

The reference of top-k and the nucleus is `mega_model.sampling`. A row's result depends only on its own logits
and `SamplingRow`: not on the other rows, their number or their order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mega_model.kernels.numba import NumbaKernels
from mega_serve.engine.grammar import GrammarError, GrammarMatcher
from mega_serve.engine.interfaces import Logits, SampledToken, SamplingRow
from mega_serve.engine.requests import NO_TOKEN_ALLOWED, TokenLogprob
from mega_serve.execution.logit_processors import (
    apply_bias,
    apply_penalties,
    has_masks,
    has_penalties,
    mask_ids,
)
from mega_serve.execution.philox import draw_uniforms
from mega_serve.execution.token_weights import (
    MAX_WORDS,
    Row,
    compute_weights,
    cut_min_p,
    cut_nucleus,
    draw_index,
    heavy_ids,
    top_k_ids,
)

# of an excluded id before the softmax of a beam search: Megatron's value, finite
_BANNED_LOGIT = -1e10


class BatchSampler:
    """Chooses tokens from logits, on the CPU; logits of another device are copied there.

    Not for use by two threads at a time: rows are computed in buffers of the sampler.

    Args:
        vocab_size: number of ids of the tokenizer; columns beyond it are never sampled.
        eod: id of end-of-document, which `min_tokens` excludes.
        kernels: if given, they cut the nucleus, with the same result.
    """

    def __init__(
        self, vocab_size: int, eod: int | None = None, *, kernels: NumbaKernels | None = None
    ) -> None:
        assert 0 < vocab_size <= MAX_WORDS, f"vocabulary of {vocab_size} words, at most {MAX_WORDS}"
        self._vocab_size = vocab_size
        self._eod = eod
        self._kernels = kernels
        self._logits = np.empty(vocab_size, np.float32)
        self._weights = np.empty(vocab_size, np.float32)
        self._mask = np.empty(-(-vocab_size // 32), np.int32)

    @torch.inference_mode()
    def sample(self, logits: Logits, rows: Sequence[SamplingRow]) -> list[SampledToken]:
        """Sample a token for each row.

        Args:
            logits: (R, V) float32, V at least `vocab_size`.

        Returns:
            One result per row. A row without any possible word has an `error` and id 0.
        """
        assert isinstance(logits, Tensor)
        assert len(logits) == len(rows), f"{len(logits)} rows of logits for {len(rows)} rows"
        host = logits.cpu()
        values = host.numpy()[:, : self._vocab_size]
        uniforms = _draw_uniforms(rows)
        chosen = [self._sample_row(values[i], row, uniforms[i]) for i, row in enumerate(rows)]
        asked = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
        if asked:
            for i, logprob_V in zip(asked, host[asked].log_softmax(-1).numpy(), strict=True):
                if chosen[i].error is None:
                    count = rows[i].params.logprobs or 0
                    token_id = chosen[i].token_id
                    chosen[i] = SampledToken(token_id, _token_logprob(logprob_V, token_id, count))
        return chosen

    @torch.inference_mode()
    def top_logprobs(
        self, logits: Logits, count: int, banned: Sequence[int | None]
    ) -> list[list[tuple[int, float]]]:
        """Return the `count` most probable (id, log-probability) of each row, ties by lower id.

        Args:
            logits: (R, V) float32. Log-probabilities are normalized over all V.
            banned: an id per row that gets the logit -1e10 first, as in Megatron's beam search; None: no id.
        """
        assert isinstance(logits, Tensor)
        rows = [i for i, token_id in enumerate(banned) if token_id is not None]
        if rows:
            logits = logits.clone()
            logits[rows, [token_id for token_id in banned if token_id is not None]] = _BANNED_LOGIT
        logprob_RV = logits.log_softmax(-1).cpu().numpy()[:, : self._vocab_size]
        return [_top(logprob_V, count) for logprob_V in logprob_RV]

    def _sample_row(self, logits: Row, row: SamplingRow, uniform: float) -> SampledToken:
        try:
            logits = self._process_logits(logits, row)
        except GrammarError as error:
            return SampledToken(0, error=str(error))
        best = int(logits.argmax())
        if not logits[best] > -np.inf:  # true for NaN, which argmax returns
            return SampledToken(0, error=_explain_empty(logits[best]))
        if row.params.is_greedy:
            return SampledToken(best)
        return SampledToken(self._draw(logits, row, uniform))

    def _process_logits(self, logits: Row, row: SamplingRow) -> Row:
        """Return the row with penalties, bias and masks; the row itself if it has none."""
        params = row.params
        penalized = has_penalties(params)
        masked = has_masks(row)
        if not (penalized or masked or params.logit_bias or row.grammar is not None):
            return logits
        np.copyto(self._logits, logits)
        if penalized:
            apply_penalties(self._logits, row)
        apply_bias(self._logits, params.logit_bias)
        if row.grammar is not None:
            self._mask_grammar(row)
        if masked:
            mask_ids(self._logits, row, self._eod)
        return self._logits

    def _mask_grammar(self, row: SamplingRow) -> None:
        assert isinstance(row.grammar, GrammarMatcher)
        row.grammar.fill_mask(self._mask)
        bits = np.unpackbits(self._mask.view(np.uint8), count=self._vocab_size, bitorder="little")
        self._logits[bits == 0] = -np.inf

    def _draw(self, logits: Row, row: SamplingRow, uniform: float) -> int:
        params = row.params
        ids: NDArray[np.intp] | None = None
        if 1 < params.top_k < self._vocab_size:
            ids = top_k_ids(logits, params.top_k)
            logits = logits[ids]
        weights = compute_weights(logits, params.temperature, self._weights[: len(logits)])
        if row.top_p < 1.0 and self._kernels is not None:
            self._kernels.nucleus.cut_nucleus(weights, row.top_p)
        elif row.top_p < 1.0:
            heavy = heavy_ids(weights, row.top_p) if ids is None else None
            if heavy is None:
                cut_nucleus(weights, row.top_p)
            else:
                ids, total = heavy
                weights = weights[ids]
                cut_nucleus(weights, row.top_p, total)
        if params.min_p > 0.0:
            cut_min_p(weights, params.min_p)
        index = draw_index(weights, uniform)
        return index if ids is None else int(ids[index])


def _draw_uniforms(rows: Sequence[SamplingRow]) -> Sequence[float]:
    """Return the random number of each row; 0 where none is needed."""
    if all(row.params.is_greedy for row in rows):
        return [0.0] * len(rows)
    seeds = np.array([row.seed & (2**64 - 1) for row in rows], np.uint64)
    numbers = draw_uniforms(seeds, [row.sequence_index for row in rows], [row.position for row in rows])
    return [float(number) for number in numbers]


def _explain_empty(largest: np.float32) -> str:
    if np.isnan(largest):
        return "logits are NaN"
    return NO_TOKEN_ALLOWED


def _token_logprob(logprob_V: Row, token_id: int, count: int) -> TokenLogprob:
    logprob = logprob_V[token_id]
    rank = 1 + int(np.count_nonzero(logprob_V > logprob))
    return TokenLogprob(token_id, float(logprob), rank, tuple(_top(logprob_V, count)))


def _top(logprob_V: Row, count: int) -> list[tuple[int, float]]:
    """Return the most probable (id, log-probability), ties by lower id."""
    if count < 1:
        return []
    ids = top_k_ids(logprob_V, min(count, len(logprob_V)))
    ids = ids[np.argsort(-logprob_V[ids], kind="stable")][:count]
    return [(int(i), float(logprob_V[i])) for i in ids]
