"""Llama style models (arXiv:2302.13971, arXiv:2307.09288).

x = E[token]
for every layer:  x = x + O · attend(rotary(Q), rotary(K), V of rmsnorm(x))
                  x = x + W₂ · (silu(G · rmsnorm(x)) ∘ (U · rmsnorm(x)))
logits = rmsnorm(x) · Hᵀ
"""

from __future__ import annotations

from torch import Tensor

from mega_model.attention import Angles, Attention
from mega_model.attention_backends import AttentionBackend
from mega_model.decoder import Decoder
from mega_model.dropout import DropoutFn
from mega_model.layers import ColumnLinear, RowLinear, build_norm, dropout_add_norm
from mega_model.recompute import recompute_closure
from mega_model.runtime import Runtime


class Llama(Decoder):
    """The Llama model, or one pipeline stage of it."""

    def __init__(self, rt: Runtime) -> None:
        super().__init__(rt, LlamaBlock)


class LlamaBlock(Attention):
    """One layer: grouped-query attention with rotary positions, then the gated feed-forward."""

    def __init__(self, rt: Runtime, layer: int) -> None:
        super().__init__(rt, layer)
        prefix = f"layers.{layer}."
        self.ffn_norm = build_norm(rt, prefix + "ffn_norm")
        self.gate_up = ColumnLinear(rt, prefix + "gate_up", bias=False)
        self.swiglu = rt.kernels.swiglu
        self.down = RowLinear(rt, prefix + "down", bias=False)

    def forward(self, x_TD: Tensor, angles: Angles, attend: AttentionBackend, drop: DropoutFn) -> Tensor:
        prefix = f"layers.{self.layer}."
        add_TD = self.attention(x_TD, self.attn_norm(x_TD), angles, attend)
        x_TD, y_TD = dropout_add_norm(self.ffn_norm, drop, prefix + "out", add_TD, x_TD)
        gate_up_TF = self.gate_up(y_TD, recompute_closure(self.recompute_norm, self.ffn_norm, x_TD))
        inner_TF = self.swiglu(gate_up_TF)
        add_TD = self.down(inner_TF, recompute_closure(self.recompute_activation, self.swiglu, gate_up_TF))
        return drop(prefix + "down", add_TD, x_TD)
