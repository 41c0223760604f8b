"""Attention as the blocks of both families have it, from the norm before it to its output projection."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mega_model.attention_backends import Attend
from mega_model.attention_mask import Reach
from mega_model.layers import ColumnLinear, RowLinear, norm
from mega_model.recompute import rerun
from mega_model.runtime import Runtime
from mega_schema.spec import ModelSpec

Angles = tuple[Tensor, Tensor] | None  # cosine and sine, where positions turn heads


class Attention(nn.Module):
    """O · attend(turned Q, turned K, V of x); a block is one of these with a feed-forward of its own.

    The head norms are whole on every rank of tp, and each norms its own heads.
    """

    def __init__(self, rt: Runtime, layer: int) -> None:
        super().__init__()
        m, at = rt.spec, f"layers.{layer}."
        self.layer, self.head_width, self.kernels = layer, m.head_width, rt.kernels
        self.recompute_norm = rt.recompute.recomputes("layernorm")
        self.recompute_activation = rt.recompute.recomputes("mlp_act")
        self.reach, self.interleaved = Reach.of(m, rt.tp), m.turning if m.rope_interleaved else 0
        self.attn_norm = norm(rt, at + "attn_norm")
        self.qkv_widths = rt.runs(at + "qkv.weight")
        self.qkv = ColumnLinear(rt, at + "qkv", bias=m.qkv_bias)
        self.q_norm = norm(rt, at + "q_norm") if m.qk_norm else None
        self.k_norm = norm(rt, at + "k_norm") if m.qk_norm else None
        self.out = RowLinear(rt, at + "out", bias=m.bias)

    def attention(self, x_TD: Tensor, y_TD: Tensor, angles: Angles, attend: Attend) -> Tensor:
        """Attention of y, which is `attn_norm` of x."""
        qkv_TW = self.qkv(y_TD, rerun(self.recompute_norm, self.attn_norm, x_TD))
        q, k, v = self._heads(qkv_TW, angles)
        return self.out(attend(self.layer, q, k, v, self.reach).flatten(1))

    def _heads(self, qkv_TW: Tensor, angles: Angles) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as attention takes them."""
        if angles is not None and self.q_norm is None and not self.interleaved:
            return self.kernels.rotate_packed(qkv_TW, self.qkv_widths, self.head_width, *angles)
        q, k, v = (y.unflatten(-1, (-1, self.head_width)) for y in qkv_TW.split(self.qkv_widths, -1))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = _each_head(self.q_norm, q), _each_head(self.k_norm, k)
        if angles is not None:
            rotate = self.kernels.rotate
            q, k = rotate(self._paired(q), *angles), rotate(self._paired(k), *angles)
        return q, k, v

    def _paired(self, x_TNH: Tensor) -> Tensor:
        """Components that turn together half of them apart, as the kernel wants them: neighbours, where the
        model is of that kind. In q and k alike this changes no score.
        """
        if not self.interleaved:
            return x_TNH
        turning, rest = x_TNH.split([self.interleaved, x_TNH.shape[-1] - self.interleaved], -1)
        return torch.cat((turning.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), rest), -1)


def _each_head(normed: nn.Module, x_TNH: Tensor) -> Tensor:
    y: Tensor = normed(x_TNH.flatten(0, 1))
    return y.view(x_TNH.shape)


def rotary_rates(m: ModelSpec, device: torch.device | None = None) -> Tensor:
    """How far each pair of components turns per token, in radians: (turning / 2,) float32.

    base^(-2i / turning), divided by the interpolation (arXiv:2306.15595), and by Llama 3.1's factor where
    the pair turns slowly (its released code; Hugging Face's rope_type "llama3").
    """
    pair = torch.arange(0, m.turning, 2, dtype=torch.float32, device=device)
    rate = m.rope_base ** (-pair / m.turning) / m.rope_interpolation
    if m.rope_scaling == 1:
        return rate
    turns = m.rope_scaling_context * rate / (2 * torch.pi)
    whole = ((turns - m.rope_scaling_low) / (m.rope_scaling_high - m.rope_scaling_low)).clamp(0, 1)
    return rate * (whole + (1 - whole) / m.rope_scaling)


def rotary_angles(position_T: Tensor, m: ModelSpec) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every token's angles, two (T, turning / 2) tensors, float32."""
    angle_TR = position_T.float()[:, None] * rotary_rates(m, position_T.device)
    return angle_TR.cos(), angle_TR.sin()
