"""One layer: attention, attention to an encoder if there is one, and the feed-forward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from mega_model.attention import Angles, Attention, CrossAttention, Memory
from mega_model.attention_backends import AttentionBackend
from mega_model.dropout import DropoutFn
from mega_model.layers import ColumnLinear, RowLinear, build_norm, dropout_add_norm
from mega_model.recompute import recompute_closure
from mega_model.runtime import Runtime


class DecoderBlock(Attention):
    """Attention, then the feed-forward, each applied to the normed stream and added to it.

    In a model with `parallel_residual` both read the input of the layer. In the decoder of an encoder-decoder
    model, attention to the encoder's output comes between the two.
    """

    def __init__(self, rt: Runtime, layer: int) -> None:
        super().__init__(rt, layer)
        m = rt.spec
        prefix = f"layers.{layer}."
        self.residual_after_norm = m.post_norm_residual
        self.parallel_residual = m.parallel_residual
        self.cross = CrossAttention(rt, layer) if m.has_cross_attention(layer) else None
        self.ffn_norm = build_norm(rt, prefix + "ffn_norm")
        self.is_gated = m.is_gated
        if m.is_gated:
            self.gate_up = ColumnLinear(rt, prefix + "gate_up", bias=m.bias)
        else:
            self.up = ColumnLinear(rt, prefix + "up", bias=m.bias)
        self.act = activation(rt)
        self.act_adds_bias = m.activation in ("gelu_tanh", "gelu_erf")
        self.down = RowLinear(rt, prefix + "down", bias=m.bias)

    def forward(
        self,
        x_TD: Tensor,
        angles: Angles,
        attend: AttentionBackend,
        drop: DropoutFn,
        row_R: Tensor | None = None,
        memory: Memory | None = None,
    ) -> Tensor:
        """Compute the layer, (T, D), or for some of the tokens (R, D).

        Args:
            memory: the encoder's output, in a layer with cross-attention.
        """
        y_TD = self.attn_norm(x_TD)
        add_TD = self.attention(x_TD, y_TD, angles, attend, row_R)
        if row_R is not None:
            x_TD, y_TD = x_TD[row_R], y_TD[row_R]
        residual_TD = y_TD if self.residual_after_norm else x_TD
        prefix = f"layers.{self.layer}."
        if self.parallel_residual:
            sum_TD = drop(prefix + "out", add_TD, x_TD)
            return drop(prefix + "down", self._feed_forward(x_TD, self.ffn_norm(x_TD)), sum_TD)
        site = prefix + "out"
        if self.cross is not None:
            assert memory is not None
            x_TD, y_TD = dropout_add_norm(self.cross.norm, drop, site, add_TD, residual_TD)
            residual_TD = y_TD if self.residual_after_norm else x_TD
            add_TD = self.cross(x_TD, y_TD, memory)
            site = prefix + "cross.out"
        x_TD, y_TD = dropout_add_norm(self.ffn_norm, drop, site, add_TD, residual_TD)
        residual_TD = y_TD if self.residual_after_norm else x_TD
        return drop(prefix + "down", self._feed_forward(x_TD, y_TD), residual_TD)

    def _feed_forward(self, x_TD: Tensor, y_TD: Tensor) -> Tensor:
        """Compute the feed-forward of y, where y is `ffn_norm` of x.

        x is needed only to recompute y in backward.
        """
        linear = self.gate_up if self.is_gated else self.up
        matmul = linear.matmul if self.act_adds_bias else linear
        inner_TF = matmul(y_TD, recompute_closure(self.recompute_norm, self.ffn_norm, x_TD))
        return self.down(
            self._activate(inner_TF), recompute_closure(self.recompute_activation, self._activate, inner_TF)
        )

    def _activate(self, inner_TF: Tensor) -> Tensor:
        """Apply the activation of the feed-forward; GELU's kernel adds the bias of `up` first."""
        return self.act(inner_TF, self.up.bias) if self.act_adds_bias else self.act(inner_TF)


def activation(rt: Runtime) -> Callable[..., Tensor]:
    """Return the activation that the spec names.

    GELU also takes the bias; a gated activation halves the width.
    """
    functions: dict[str, Callable[..., Tensor]] = {
        "gelu_tanh": lambda x, bias: rt.kernels.bias_gelu(x, bias, "tanh"),
        "gelu_erf": lambda x, bias: rt.kernels.bias_gelu(x, bias, "none"),
        "relu": F.relu,
        "squared_relu": lambda x: F.relu(x).square(),
        "swiglu": rt.kernels.swiglu,
        "geglu": partial(_multiply_by_gate, lambda gate: rt.kernels.bias_gelu(gate, None, "none")),
        "geglu_tanh": partial(_multiply_by_gate, lambda gate: rt.kernels.bias_gelu(gate, None, "tanh")),
        "reglu": partial(_multiply_by_gate, F.relu),
        "liglu": partial(_multiply_by_gate, lambda gate: gate),
    }
    return functions[rt.spec.activation]


def _multiply_by_gate(act: Callable[[Tensor], Tensor], x_TF: Tensor) -> Tensor:
    """Compute act(gate) · up of the two halves of the last dimension, gate and up (arXiv:2002.05202)."""
    gate, up = x_TF.chunk(2, -1)
    return act(gate) * up
