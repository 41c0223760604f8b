"""Attention as the blocks of both families have it, from the norm before it to its output projection."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mega_model.attention_backends import AttentionBackend
from mega_model.attention_mask import AttentionMask
from mega_model.layers import ColumnLinear, RowLinear, build_norm
from mega_model.recompute import recompute_closure
from mega_model.runtime import Runtime
from mega_schema.spec import ModelSpec

Angles = tuple[Tensor, Tensor] | None  # cosine and sine, where positions turn heads


class Attention(nn.Module):
    """O · attend(turned Q, turned K, V of x); a block is one of these with a feed-forward of its own.

    The head norms are whole on every rank of tp, and each norms its own heads.
    """

    def __init__(self, rt: Runtime, layer: int) -> None:
        super().__init__()
        m, prefix = rt.spec, f"layers.{layer}."
        self.layer, self.head_width, self.kernels = layer, m.head_width, rt.kernels
        self.recompute_norm = rt.recompute.recomputes("layernorm")
        self.recompute_activation = rt.recompute.recomputes("mlp_act")
        self.mask, self.interleaved_dim = (
            AttentionMask.from_spec(m, rt.tp),
            m.rotary_dim if m.rope_interleaved else 0,
        )
        self.attn_norm = build_norm(rt, prefix + "attn_norm")
        self.qkv_widths = rt.run_lengths(prefix + "qkv.weight")
        self.qkv = ColumnLinear(rt, prefix + "qkv", bias=m.qkv_bias)
        self.q_norm = build_norm(rt, prefix + "q_norm") if m.qk_norm else None
        self.k_norm = build_norm(rt, prefix + "k_norm") if m.qk_norm else None
        self.out = RowLinear(rt, prefix + "out", bias=m.bias)

    def attention(self, x_TD: Tensor, y_TD: Tensor, angles: Angles, attend: AttentionBackend) -> Tensor:
        """Attention of y, which is `attn_norm` of x."""
        qkv_TW = self.qkv(y_TD, recompute_closure(self.recompute_norm, self.attn_norm, x_TD))
        q, k, v = self._split_heads(qkv_TW, angles)
        return self.out(attend(self.layer, q, k, v, self.mask).flatten(1))

    def _split_heads(self, qkv_TW: Tensor, angles: Angles) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as attention takes them."""
        if angles is not None and self.q_norm is None and not self.interleaved_dim:
            return self.kernels.apply_rotary_packed(qkv_TW, self.qkv_widths, self.head_width, *angles)
        q, k, v = (y.unflatten(-1, (-1, self.head_width)) for y in qkv_TW.split(self.qkv_widths, -1))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = _norm_heads(self.q_norm, q), _norm_heads(self.k_norm, k)
        if angles is not None:
            apply_rotary = self.kernels.apply_rotary
            q, k = apply_rotary(self._deinterleave(q), *angles), apply_rotary(self._deinterleave(k), *angles)
        return q, k, v

    def _deinterleave(self, x_TNH: Tensor) -> Tensor:
        """Components that turn together half of them apart, as the kernel wants them: neighbours, where the
        model is of that kind. In q and k alike this changes no score.
        """
        if not self.interleaved_dim:
            return x_TNH
        rotary, rest = x_TNH.split([self.interleaved_dim, x_TNH.shape[-1] - self.interleaved_dim], -1)
        return torch.cat((rotary.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), rest), -1)


def _norm_heads(norm: nn.Module, x_TNH: Tensor) -> Tensor:
    y: Tensor = norm(x_TNH.flatten(0, 1))
    return y.view(x_TNH.shape)


def inv_freq(m: ModelSpec, device: torch.device | None = None) -> Tensor:
    """How far each pair of components turns per token, in radians: (turning / 2,) float32.

    base^(-2i / turning), divided by the interpolation (arXiv:2306.15595), and by Llama 3.1's factor where
    the pair turns slowly (its released code; Hugging Face's rope_type "llama3").
    """
    pair = torch.arange(0, m.rotary_dim, 2, dtype=torch.float32, device=device)
    freq = m.rope_base ** (-pair / m.rotary_dim) / m.rope_interpolation
    if m.rope_scaling == 1:
        return freq
    rotations = m.rope_scaling_context * freq / (2 * torch.pi)
    unscaled = ((rotations - m.rope_scaling_low) / (m.rope_scaling_high - m.rope_scaling_low)).clamp(0, 1)
    return freq * (unscaled + (1 - unscaled) / m.rope_scaling)


def rotary_angles(position_T: Tensor, m: ModelSpec) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every token's angles, two (T, turning / 2) tensors, float32."""
    angle_TR = position_T.float()[:, None] * inv_freq(m, position_T.device)
    return angle_TR.cos(), angle_TR.sin()
