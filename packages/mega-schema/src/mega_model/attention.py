"""Attention to the tokens themselves or to an encoder's, from the norm before it to its output projection."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mega_model.attention_backends import AttentionBackend
from mega_model.attention_mask import AttentionMask
from mega_model.kernels import reference
from mega_model.layers import ColumnLinear, RowLinear, build_norm
from mega_model.recompute import recompute_closure
from mega_model.runtime import Runtime
from mega_schema.spec import ModelSpec

AnglesFn = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Angles = tuple[Tensor, Tensor] | None  # cosine and sine; None for models without rotary positions


class Attention(nn.Module):
    """Project to queries, keys and values, attend, and project back: O · attend(rotary(Q), rotary(K), V).

    A block is a subclass that adds a feed-forward. The weights of the head norms are whole on every rank of
    tp; each rank norms its own heads.
    """

    def __init__(self, rt: Runtime, layer: int) -> None:
        super().__init__()
        m = rt.spec
        prefix = f"layers.{layer}."
        self.layer = layer
        self.head_dim = m.head_dim
        self.kernels = rt.kernels
        self.recompute_norm = rt.recompute.recomputes("layernorm")
        self.recompute_activation = rt.recompute.recomputes("mlp_act")
        self.mask = AttentionMask.from_spec(m, rt.tp, layer)
        self.interleaved_dim = m.rotary_dim if m.rope_interleaved else 0
        has_norm = layer > 0 or m.first_attention_norm
        self.attn_norm = build_norm(rt, prefix + "attn_norm") if has_norm else nn.Identity()
        self.qkv_widths = rt.block_lengths(prefix + "qkv.weight")
        self.qkv = ColumnLinear(rt, prefix + "qkv", bias=m.qkv_bias)
        self.q_norm = build_norm(rt, prefix + "q_norm") if m.qk_norm else None
        self.k_norm = build_norm(rt, prefix + "k_norm") if m.qk_norm else None
        self.out = RowLinear(rt, prefix + "out", bias=m.bias)
        self.query_scale = _query_scale(m)

    def attention(
        self,
        x_TD: Tensor,
        y_TD: Tensor,
        angles: Angles,
        attend: AttentionBackend,
        row_R: Tensor | None = None,
    ) -> Tensor:
        """Compute attention of y, where y is `attn_norm` of x; (T, D), or for the tokens `row_R` (R, D).

        x is needed only to recompute y in backward.
        """
        qkv_TW = self.qkv(y_TD, recompute_closure(self.recompute_norm, self.attn_norm, x_TD))
        q, k, v = self._split_heads(qkv_TW, angles)
        if row_R is not None:
            q = q[row_R]
        if self.query_scale != 1:
            q = q * self.query_scale
        return self.out(attend(self.layer, q, k, v, self.mask).flatten(1))

    def _split_heads(self, qkv_TW: Tensor, angles: Angles) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries (T, N, H), keys and values (T, K, H), with rotary positions applied."""
        if angles is not None and self.q_norm is None and not self.interleaved_dim:
            return self.kernels.apply_rotary_packed(qkv_TW, self.qkv_widths, self.head_dim, *angles)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in qkv_TW.split(self.qkv_widths, -1))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = _norm_heads(self.q_norm, q), _norm_heads(self.k_norm, k)
        if angles is not None:
            apply_rotary = self.kernels.apply_rotary
            q, k = apply_rotary(self._deinterleave(q), *angles), apply_rotary(self._deinterleave(k), *angles)
        return q, k, v

    def _deinterleave(self, x_TNH: Tensor) -> Tensor:
        """Move the rotary pairs (2i, 2i + 1) to (i, i + R), the order that the kernel expects.

        Applied to q and k alike, this permutation changes no score. Models without interleaved pairs pass
        through.
        """
        if not self.interleaved_dim:
            return x_TNH
        rotary, unrotated = x_TNH.split([self.interleaved_dim, x_TNH.shape[-1] - self.interleaved_dim], -1)
        return torch.cat((rotary.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), unrotated), -1)


class Memory(NamedTuple):
    """What a decoder attends to besides its own tokens.

    A tuple, so that FSDP2 finds the tensor among the arguments of a layer.

    Attributes:
        states_ED: output of the encoder; with sequence parallelism, this rank's shard of its tokens.
        attend: attention of the decoder's tokens to those of the encoder.
    """

    states_ED: Tensor
    attend: AttentionBackend


class CrossAttention(nn.Module):
    """Attend to an encoder's output: O · attend(Q, K, V), with Q of the tokens and K, V of the encoder's."""

    def __init__(self, rt: Runtime, layer: int) -> None:
        super().__init__()
        m = rt.spec
        prefix = f"layers.{layer}.cross."
        self.layer = layer
        self.head_dim = m.head_dim
        self.recompute_norm = rt.recompute.recomputes("layernorm")
        self.norm = build_norm(rt, prefix + "norm")
        self.q = ColumnLinear(rt, prefix + "q", bias=m.qkv_bias)
        self.kv_widths = rt.block_lengths(prefix + "kv.weight")
        self.kv = ColumnLinear(rt, prefix + "kv", bias=m.qkv_bias)
        self.out = RowLinear(rt, prefix + "out", bias=m.bias)
        self.query_scale = _query_scale(m)

    def forward(self, x_TD: Tensor, y_TD: Tensor, memory: Memory) -> Tensor:
        """Compute attention of y, where y is `norm` of x, to the encoder's output, (T, D).

        x is needed only to recompute y in backward.
        """
        q_TW = self.q(y_TD, recompute_closure(self.recompute_norm, self.norm, x_TD))
        if self.query_scale != 1:
            q_TW = q_TW * self.query_scale
        k_EW, v_EW = self.kv(memory.states_ED).split(self.kv_widths, -1)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in (q_TW, k_EW, v_EW))
        return self.out(memory.attend(self.layer, q, k, v).flatten(1))


def _query_scale(m: ModelSpec) -> float:
    """Return the factor of the queries that cancels the backends' 1/√H in a model without it."""
    return 1.0 if m.scale_attention else math.sqrt(m.head_dim)


def _norm_heads(norm: nn.Module, x_TNH: Tensor) -> Tensor:
    y: Tensor = norm(x_TNH.flatten(0, 1))
    return y.view(x_TNH.shape)


def inv_freq(m: ModelSpec, device: torch.device | None = None) -> Tensor:
    """Return the rotary frequency of each pair, radians per token: (rotary_dim / 2,) float32.

    base^(-2i / rotary_dim), divided by the interpolation factor (arXiv:2306.15595). Llama 3.1's scaling
    divides the low frequencies by a further factor (its released code; Hugging Face's rope_type "llama3").
    """
    pair = torch.arange(0, m.rotary_dim, 2, dtype=torch.float32, device=device)
    freq = m.rope_theta ** (-pair / m.rotary_dim) / m.rope_interpolation
    if m.rope_scaling == 1:
        return freq
    rotations = m.rope_scaling_context * freq / (2 * torch.pi)
    unscaled = ((rotations - m.rope_scaling_low) / (m.rope_scaling_high - m.rope_scaling_low)).clamp(0, 1)
    return freq * (unscaled + (1 - unscaled) / m.rope_scaling)


class RotaryTable:
    """`rotary_angles` of all positions of a model, computed once and looked up."""

    def __init__(
        self, m: ModelSpec, device: torch.device | None = None, angles: AnglesFn = reference.angles
    ) -> None:
        position_S = torch.arange(m.max_seq_len, device=device)
        self._cos_SR, self._sin_SR = rotary_angles(position_S, m, angles)

    def __call__(self, position_T: Tensor) -> tuple[Tensor, Tensor]:
        return self._cos_SR[position_T], self._sin_SR[position_T]


def rotary_angles(
    position_T: Tensor, m: ModelSpec, angles: AnglesFn = reference.angles
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of every token's angles, two (T, rotary_dim / 2) tensors, float32."""
    return angles(position_T, inv_freq(m, position_T.device))
