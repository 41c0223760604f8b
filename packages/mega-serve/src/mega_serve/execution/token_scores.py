"""Log-probabilities of given tokens: value, rank and the most probable words, in bounded memory.

Legend: R rows; V words of the vocabulary without padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mega_serve.engine.requests import TokenLogprob

_SLICE_BYTES = 64 << 20  # of float32 logits and log-probabilities at a time

LogSoftmax = Callable[[Tensor], Tensor]


def torch_log_softmax(logits_RV: Tensor) -> Tensor:
    """Return the log-probabilities of every row, in torch's order of additions."""
    return logits_RV.log_softmax(-1)


def score_tokens(
    compute_logits: Callable[[Tensor], Tensor],
    x_RD: Tensor,
    tokens: Sequence[int],
    top: int,
    vocab: int,
    log_softmax: LogSoftmax = torch_log_softmax,
) -> tuple[TokenLogprob, ...]:
    """Return the log-probability of tokens[r] by the logits of row r.

    Args:
        compute_logits: the head: (r, D) to (r, V) float32.
        top: number of most probable words to report.
        log_softmax: normalizes the logits.
    """
    step = max(1, _SLICE_BYTES // (2 * 4 * vocab))
    scores: list[TokenLogprob] = []
    for first in range(0, len(tokens), step):
        slice_tokens = tokens[first : first + step]
        logprob_RV = log_softmax(compute_logits(x_RD[first : first + len(slice_tokens)]))
        scores += _score_slice(logprob_RV, slice_tokens, min(top, vocab))
    return tuple(scores)


def _score_slice(logprob_RV: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    token_R = torch.tensor(tokens, device=logprob_RV.device)
    chosen_R1 = logprob_RV.gather(1, token_R[:, None])
    ranks = (1 + (logprob_RV > chosen_R1).sum(1)).tolist()
    best = logprob_RV.topk(top)  # sorted
    tops = [
        tuple(zip(ids, values, strict=True))
        for ids, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
    return [
        TokenLogprob(*fields) for fields in zip(tokens, chosen_R1[:, 0].tolist(), ranks, tops, strict=True)
    ]
