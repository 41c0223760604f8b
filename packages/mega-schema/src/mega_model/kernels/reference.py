"""The definitions. Every faster version is tested against these, and a CPU runs them as they are."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x_TD: Tensor, scale_D: Tensor, eps: float) -> Tensor:
    """x / rms(x) · scale, with the mean square taken in float32 (arXiv:1910.07467, eq. 4)."""
    x = x_TD.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)).to(x_TD.dtype) * scale_D


def layer_norm(x_TD: Tensor, scale_D: Tensor, shift_D: Tensor, eps: float) -> Tensor:
    """(x - mean) / deviation · scale + shift, with the moments taken in float32 (arXiv:1607.06450)."""
    return F.layer_norm(x_TD, scale_D.shape, scale_D, shift_D, eps)


def swiglu(x_TF: Tensor) -> Tensor:
    """silu(gate) · up, the two halves of the last dimension in that order (arXiv:2002.05202)."""
    gate, up = x_TF.chunk(2, -1)
    return F.silu(gate) * up


def rotate(x_TNH: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Turn the first 2R components of every head, as pairs (i, i + R); the rest pass (arXiv:2104.09864).

    Args:
        cos_TR, sin_TR: of each token's angles, R pairs.
    """
    pairs = cos_TR.shape[-1]
    cos, sin = cos_TR[:, None].to(x_TNH.dtype), sin_TR[:, None].to(x_TNH.dtype)
    a, b, rest = x_TNH.split([pairs, pairs, x_TNH.shape[-1] - 2 * pairs], -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)
