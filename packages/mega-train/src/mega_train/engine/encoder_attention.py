"""Attention of an encoder's rows, whose padding is hidden."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from mega_model.attention_backends import AttentionBackend, PackedAttention
from mega_model.dropout import Dropout
from mega_model.kernels import Kernels
from mega_model.recompute import RecomputedAttention
from mega_model.unpadded_attention import UnpaddedAttention
from mega_schema.recompute_policy import RecomputePolicy


def encoder_attention(
    kernels: Kernels,
    recompute: RecomputePolicy,
    real_BS: np.ndarray,
    dropout: Dropout | None,
    device: torch.device,
    *,
    causal: bool = False,
) -> AttentionBackend:
    """Return attention among the real tokens of each row.

    Args:
        real_BS: 1 at real tokens, 0 at padding.
        causal: whether a token sees no later token.
    """
    has_padding = bool((real_BS == 0).any())
    rows, length = real_BS.shape
    attend = PackedAttention(
        rows,
        length,
        torch.from_numpy(real_BS).to(device, non_blocking=True) if has_padding else None,
        causal=causal,
        dropout=dropout,
        attention=kernels.attention,
        softmax=kernels.masked_softmax,
    )
    return recomputed_core_attention(attend, recompute)


def unpadded_attention(
    kernels: Kernels,
    recompute: RecomputePolicy,
    lengths: Sequence[int],
    dropout: Dropout | None,
    device: torch.device,
    *,
    causal: bool = False,
) -> AttentionBackend:
    """Return attention among the tokens of each row, for rows of these lengths without padding."""
    attend = UnpaddedAttention.from_lengths(
        lengths,
        causal=causal,
        device=device,
        dropout=dropout,
        attention=kernels.attention,
        softmax=kernels.masked_softmax,
    )
    return recomputed_core_attention(attend, recompute)


def recomputed_core_attention(attend: AttentionBackend, recompute: RecomputePolicy) -> AttentionBackend:
    """Return the backend, recomputed in backward if the policy says so."""
    return RecomputedAttention(attend) if recompute.recomputes("core_attn") else attend
