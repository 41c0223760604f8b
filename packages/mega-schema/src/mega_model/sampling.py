"""Sample a token from logits: temperature, top-k or top-p, softmax, draw.

The random generator is an argument.

Shape suffixes: B rows of a batch, V words of the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

# a lower temperature is 0 in float32: dividing by it would turn the best word's logit into 0 / 0
_MIN_TEMPERATURE = torch.finfo(torch.float32).tiny


def top_k_mask(logits_BV: Tensor, k: int) -> Tensor:
    """Return the mask of words that top-k removes: those below the k-th largest logit; ties with it stay."""
    kth_B1 = logits_BV.topk(min(k, logits_BV.shape[-1]), dim=-1).values[:, -1:]
    return logits_BV < kth_B1


def top_p_mask(logits_BV: Tensor, p: float) -> Tensor:
    """Return the mask of words that nucleus sampling removes (arXiv:1904.09751).

    Words are kept in order of probability until their sum exceeds p; the word that crosses p is kept, and the
    most probable one always is.
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
    """Sample one word for every row, as Megatron's engine does.

    Args:
        logits_BV: without the padding of the vocabulary.
        temperature: above 0; divides the logits. Without effect for top_k=1.
        top_k: 1 takes the most probable word without a draw; above 1 keeps that many, and ties of the last; 0
            keeps all, and so does a number larger than the vocabulary.
        top_p: used only if top_k is 0; 0 keeps all.
        generator: on the device of the logits; None uses torch's default.

    Returns:
        (B,) int64.
    """
    if top_k == 1:
        return logits_BV.argmax(-1)
    logits_BV = logits_BV.float()
    if temperature != 1.0:
        # relative to the best word, so that no quotient overflows upwards at a low temperature
        below_BV = logits_BV - logits_BV.amax(-1, keepdim=True)
        logits_BV = below_BV / max(temperature, _MIN_TEMPERATURE)
    if top_k > 1:
        logits_BV = logits_BV.masked_fill(top_k_mask(logits_BV, top_k), float("-inf"))
    elif top_p > 0.0:
        logits_BV = logits_BV.masked_fill(top_p_mask(logits_BV, top_p), float("-inf"))
    return logits_BV.softmax(-1).multinomial(1, generator=generator).squeeze(-1)
