"""GPT-2 style models (Radford et al. 2019), with all variations of Megatron's GPT.

x = E[token] + P[position]      or the embedding normed first, or other positions
for every layer:  x = x + O · attend(Q, K, V of norm(x))
                  x = x + W₂ · act(W₁ · norm(x))        or of the layer's input (parallel residual)
logits = norm(x) · Eᵀ
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from mega_model.attention import Angles, Attention
from mega_model.attention_backends import AttentionBackend
from mega_model.decoder import Decoder
from mega_model.dropout import DropoutFn
from mega_model.layers import (
    ColumnLinear,
    PositionEmbedding,
    RowLinear,
    build_norm,
    dropout_add_norm,
    sinusoids,
)
from mega_model.recompute import recompute_closure
from mega_model.runtime import Runtime


class GPT(Decoder):
    """The GPT model, or one pipeline stage of it."""

    def __init__(self, rt: Runtime) -> None:
        super().__init__(rt, GPTBlock)
        if rt.stage.is_first and rt.spec.positions == "learned":
            self.position = PositionEmbedding(rt, "position")
        if rt.stage.is_first and rt.spec.embed_norm:
            self.embed_norm = build_norm(rt, "embed_norm")

    def embed_tokens(self, token_T: Tensor, position_T: Tensor) -> Tensor:
        x_TD = self.embed(token_T)
        if self.spec.embed_norm:
            x_TD = self.embed_norm(x_TD)
        if self.spec.scale_embedding:
            x_TD = x_TD * math.sqrt(self.spec.hidden)
        local_position_T = self.tp.local_shard(position_T)
        if self.spec.positions == "learned":
            x_TD = x_TD + self.position(local_position_T)
        elif self.spec.positions == "sinusoidal":
            x_TD = x_TD + sinusoids(local_position_T, self.spec.hidden).to(x_TD.dtype)
        return x_TD


class GPTBlock(Attention):
    """One layer: attention, then the feed-forward, each applied to the normed stream and added to it.

    In a model with `parallel_residual` both read the input of the layer.
    """

    def __init__(self, rt: Runtime, layer: int) -> None:
        super().__init__(rt, layer)
        m = rt.spec
        prefix = f"layers.{layer}."
        self.residual_after_norm = m.post_norm_residual
        self.parallel_residual = m.parallel_residual
        self.ffn_norm = build_norm(rt, prefix + "ffn_norm")
        self.up = ColumnLinear(rt, prefix + "up", bias=m.bias)
        self.act = activation(rt)
        self.act_adds_bias = rt.spec.activation in ("gelu_tanh", "gelu_erf")
        self.down = RowLinear(rt, prefix + "down", bias=m.bias)

    def forward(self, x_TD: Tensor, angles: Angles, attend: AttentionBackend, drop: DropoutFn) -> Tensor:
        y_TD = self.attn_norm(x_TD)
        add_TD = self.attention(x_TD, y_TD, angles, attend)
        residual_TD = y_TD if self.residual_after_norm else x_TD
        prefix = f"layers.{self.layer}."
        if self.parallel_residual:
            sum_TD = drop(prefix + "out", add_TD, x_TD)
            return drop(prefix + "down", self._feed_forward(x_TD, self.ffn_norm(x_TD)), sum_TD)
        x_TD, y_TD = dropout_add_norm(self.ffn_norm, drop, prefix + "out", add_TD, residual_TD)
        residual_TD = y_TD if self.residual_after_norm else x_TD
        return drop(prefix + "down", self._feed_forward(x_TD, y_TD), residual_TD)

    def _feed_forward(self, x_TD: Tensor, y_TD: Tensor) -> Tensor:
        """Compute the feed-forward of y, where y is `ffn_norm` of x.

        x is needed only to recompute y in backward.
        """
        up = self.up.matmul if self.act_adds_bias else self.up
        up_TF = up(y_TD, recompute_closure(self.recompute_norm, self.ffn_norm, x_TD))
        return self.down(
            self._activate(up_TF), recompute_closure(self.recompute_activation, self._activate, up_TF)
        )

    def _activate(self, up_TF: Tensor) -> Tensor:
        """Apply the activation of the feed-forward; GELU's kernel adds the bias of `up` first."""
        return self.act(up_TF, self.up.bias) if self.act_adds_bias else self.act(up_TF)


def activation(rt: Runtime) -> Callable[..., Tensor]:
    """Return the activation that the spec names.

    GELU also takes the bias; a gated activation halves the width.
    """
    functions: dict[str, Callable[..., Tensor]] = {
        "gelu_tanh": lambda x, bias: rt.kernels.bias_gelu(x, bias, "tanh"),
        "gelu_erf": lambda x, bias: rt.kernels.bias_gelu(x, bias, "none"),
        "squared_relu": lambda x: F.relu(x).square(),
        "swiglu": rt.kernels.swiglu,
        "geglu": partial(_multiply_by_gate, F.gelu),
        "reglu": partial(_multiply_by_gate, F.relu),
        "liglu": partial(_multiply_by_gate, lambda gate: gate),
    }
    return functions[rt.spec.activation]


def _multiply_by_gate(act: Callable[[Tensor], Tensor], x_TF: Tensor) -> Tensor:
    """Compute act(gate) · up of the two halves of the last dimension, gate and up (arXiv:2002.05202)."""
    gate, up = x_TF.chunk(2, -1)
    return act(gate) * up
