"""From logits to one token: temperature, top-k or top-p, softmax, a draw. Randomness is an argument.

Shape suffixes: B rows of a batch, V words of the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

# a temperature below this is no float32: dividing by it would make 0 / 0 of the best word's logit
_MIN_TEMPERATURE = torch.finfo(torch.float32).tiny


def top_k_mask(logits_BV: Tensor, k: int) -> Tensor:
    """Which words top-k drops: those below the k-th largest logit, so that ties with it stay."""
    kth_B1 = logits_BV.topk(min(k, logits_BV.shape[-1]), dim=-1).values[:, -1:]
    return logits_BV < kth_B1


def top_p_mask(logits_BV: Tensor, p: float) -> Tensor:
    """Which words nucleus sampling drops (arXiv:1904.09751).

    Words are taken from the likeliest on until their probabilities sum to more than p; the word that crosses
    p stays, and the likeliest always does.
    """
    sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True)
    beyond_BV = sorted_BV.softmax(-1).cumsum(-1) > p
    beyond_BV = beyond_BV.roll(1, dims=-1)
    beyond_BV[:, 0] = False
    return torch.zeros_like(beyond_BV).scatter(-1, order_BV, beyond_BV)


def sample_token(
    logits_BV: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 0.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """One word for every row, as Megatron's engine chooses it.

    Args:
        logits_BV: without the padding of the vocabulary.
        temperature: above 0; divides the logits. It does nothing to top_k=1.
        top_k: 1 takes the likeliest word and draws nothing; above 1 keeps that many and the ties of the
            last; 0 keeps all. More than there are words keeps all.
        top_p: looked at only where top_k is 0; 0 keeps all.
        generator: of the device of the logits; None draws from torch's own.

    Returns:
        (B,) int64.
    """
    if top_k == 1:
        return logits_BV.argmax(-1)
    logits_BV = logits_BV.float()
    if temperature != 1.0:
        # from the best word down, so that no quotient overflows upwards however cold it is
        below_BV = logits_BV - logits_BV.amax(-1, keepdim=True)
        logits_BV = below_BV / max(temperature, _MIN_TEMPERATURE)
    if top_k > 1:
        logits_BV = logits_BV.masked_fill(top_k_mask(logits_BV, top_k), float("-inf"))
    elif top_p > 0.0:
        logits_BV = logits_BV.masked_fill(top_p_mask(logits_BV, top_p), float("-inf"))
    return logits_BV.softmax(-1).multinomial(1, generator=generator).squeeze(-1)
