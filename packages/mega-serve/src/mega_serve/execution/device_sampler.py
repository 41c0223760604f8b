"""Sample plain rows where the logits are, so that only token ids are copied to the host.

`sampler.BatchSampler` is the definition: the weights are the same integers, so their sums are exact and the
nucleus, the ties and the drawn words are the same for the same logits. The one difference is exp, which
devices round differently in the last bit.

Legend: R rows; V words of the tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mega_serve.engine.interfaces import Logits, SampledToken, SamplingRow
from mega_serve.execution.logit_processors import has_masks, has_penalties
from mega_serve.execution.sampler import BatchSampler, draw_row_uniforms, explain_empty
from mega_serve.execution.token_weights import MAX_WEIGHT, MIN_TEMPERATURE


class DeviceSampler:
    """A `TokenSampler` for logits on a GPU: plain rows there, all others by a `BatchSampler` on the CPU.

    A row is plain if it has no penalty, bias, mask or grammar, and asks for no log-probabilities.

    Args:
        vocab_size, eod: see `BatchSampler`.
    """

    def __init__(self, vocab_size: int, eod: int | None = None) -> None:
        self._vocab_size = vocab_size
        self._host = BatchSampler(vocab_size, eod)

    @torch.inference_mode()
    def sample(self, logits: Logits, rows: Sequence[SamplingRow]) -> list[SampledToken]:
        """Sample a token for each row; see `BatchSampler.sample`."""
        assert isinstance(logits, Tensor)
        assert len(logits) == len(rows), f"{len(logits)} rows of logits for {len(rows)} rows"
        plain = [i for i, row in enumerate(rows) if is_plain(row)]
        if len(plain) == len(rows):
            return self._sample_plain(logits, rows)
        others = [i for i, row in enumerate(rows) if not is_plain(row)]
        results: dict[int, SampledToken] = {}
        for indices, sample in ((plain, self._sample_plain), (others, self._host.sample)):
            if indices:
                chosen = sample(logits[_upload(indices, logits)], [rows[i] for i in indices])
                results.update(zip(indices, chosen, strict=True))
        return [results[i] for i in range(len(rows))]

    def top_logprobs(
        self, logits: Logits, count: int, banned: Sequence[int | None]
    ) -> list[list[tuple[int, float]]]:
        """Return the most probable words of each row; see `BatchSampler.top_logprobs`."""
        return self._host.top_logprobs(logits, count, banned)

    def _sample_plain(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
        logits_RV = logits[:, : self._vocab_size]
        best_R = logits_RV.argmax(1)
        largest_R = logits_RV.gather(1, best_R[:, None])[:, 0]
        token_R = best_R
        if not all(row.params.is_greedy for row in rows):
            drawn_R, is_greedy_R = self._draw(logits_RV, largest_R, rows)
            token_R = torch.where(is_greedy_R, best_R, drawn_R)
        # one copy; a double holds an id exactly
        results = torch.stack((token_R.double(), largest_R.double())).cpu().numpy()
        return [
            SampledToken(int(token)) if largest > -np.inf else SampledToken(0, error=explain_empty(largest))
            for token, largest in results.T
        ]

    def _draw(
        self, logits_RV: Tensor, largest_R: Tensor, rows: Sequence[SamplingRow]
    ) -> tuple[Tensor, Tensor]:
        """Return a drawn id for each row, and which rows are greedy instead."""
        vocab = logits_RV.shape[1]
        params = [row.params for row in rows]
        fields = np.array(
            [
                [p.is_greedy for p in params],
                [max(p.temperature, MIN_TEMPERATURE) for p in params],
                [row.top_p for row in rows],
                [p.min_p for p in params],
                draw_row_uniforms(rows),
                [p.top_k if 1 < p.top_k < vocab else vocab for p in params],
            ]
        )
        is_greedy_R, temperature_R, top_p_R, min_p_R, uniform_R, top_k_R = _upload(fields, logits_RV)
        weights_RV = compute_weights(logits_RV, largest_R, temperature_R.float())
        most = max((p.top_k for p in params if 1 < p.top_k < vocab), default=0)
        if most:
            smallest_R = _kth_largest(logits_RV, top_k_R.long(), most)
            weights_RV = weights_RV.where(logits_RV >= smallest_R[:, None], 0.0)
        if any(row.top_p < 1.0 for row in rows):
            weights_RV = cut_nucleus(weights_RV, top_p_R)
        if any(p.min_p > 0.0 for p in params):
            floor_R = (min_p_R * MAX_WEIGHT).float()
            weights_RV = weights_RV.where(weights_RV >= floor_R[:, None], 0.0)
        return draw_index(weights_RV, uniform_R), is_greedy_R.bool()


def is_plain(row: SamplingRow) -> bool:
    """Whether a row is sampled from its logits alone."""
    params = row.params
    needs_host = has_penalties(params) or has_masks(row) or params.logprobs is not None
    return not (needs_host or params.logit_bias or row.grammar is not None)


def compute_weights(logits_RV: Tensor, largest_R: Tensor, temperature_R: Tensor) -> Tensor:
    """Return the integer weights of exp(logits / temperature), as `token_weights.compute_weights` does."""
    largest_R1 = largest_R[:, None]
    scores_RV = (logits_RV - largest_R1) / temperature_R[:, None]
    weights_RV = (scores_RV.exp() * MAX_WEIGHT).round()
    # infinite logits share the probability; inf - inf is NaN
    is_infinite_RV = (logits_RV == torch.inf).float() * MAX_WEIGHT
    return torch.where(largest_R1 == torch.inf, is_infinite_RV, weights_RV)


def cut_nucleus(weights_RV: Tensor, p_R: Tensor) -> Tensor:
    """Return the weights with those outside the nucleus set to 0, as `token_weights.cut_nucleus` does.

    Args:
        p_R: float64; a row with p = 1 keeps all.
    """
    ordered_RV, id_RV = weights_RV.sort(stable=True, dim=1, descending=True)
    sums_RV = ordered_RV.double().cumsum(1)
    target_R1 = p_R[:, None] * sums_RV[:, -1:]
    # a word belongs to the nucleus if the words before it do not exceed the target
    before_RV = sums_RV - ordered_RV
    ordered_RV = ordered_RV.where(before_RV <= target_R1, 0.0)
    return torch.empty_like(weights_RV).scatter_(1, id_RV, ordered_RV)


def draw_index(weights_RV: Tensor, uniform_R: Tensor) -> Tensor:
    """Return the first index of each row at which the cumulative weight exceeds uniform · sum."""
    sums_RV = weights_RV.double().cumsum(1)
    total_R = sums_RV[:, -1]
    threshold_R = torch.minimum((uniform_R * total_R).floor(), total_R - 1.0)
    return torch.searchsorted(sums_RV, threshold_R[:, None], right=True)[:, 0]


def _kth_largest(logits_RV: Tensor, k_R: Tensor, most: int) -> Tensor:
    """Return the k-th largest logit of each row, -inf where k is larger than `most`."""
    largest_Rk = logits_RV.topk(most, 1).values
    kth_R = largest_Rk.gather(1, (k_R - 1).clamp(max=most - 1)[:, None])[:, 0]
    return kth_R.where(k_R <= most, -torch.inf)


def _upload(values: Sequence[int] | np.ndarray, like: Tensor) -> Tensor:
    """Copy numbers to the device of a tensor without waiting for it."""
    host = torch.as_tensor(values)
    if like.device.type == "cuda":
        host = host.pin_memory()
    return host.to(like.device, non_blocking=True)
