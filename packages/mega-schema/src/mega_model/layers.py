"""Tensor-parallel layers. Each docstring gives the layer's equation; no layer tests `if tp > 1`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mega_model import fp8
from mega_model.dropout import DropoutFn, no_dropout
from mega_model.kernels import reference
from mega_model.loss import head_loss, token_losses
from mega_model.runtime import Runtime
from mega_model.tensor_parallel_ops import column_linear, row_linear, vocab_embedding

# recomputes a layer's input in backward, see `recompute.recompute_closure`
RecomputeInput = Callable[[], Tensor] | None


class ColumnLinear(nn.Module):
    """y = x Wᵀ + b with the rows of W and b split over tp: whole input, a slice of the output per rank."""

    def __init__(self, rt: Runtime, name: str, *, bias: bool) -> None:
        super().__init__()
        self.tp = rt.tp
        self.gradients = rt.weight_gradients
        self.weight = rt.new_param(name + ".weight")
        self.bias = rt.new_param(name + ".bias") if bias else None
        self.fp8 = rt.fp8
        self.linear = rt.kernels.linear

    def forward(self, x: Tensor, recompute_input: RecomputeInput = None) -> Tensor:
        if self.fp8 is None:
            return column_linear(
                x, self.weight, self.bias, self.tp, self.gradients, self.linear, recompute_input
            )
        return self.matmul(x) if self.bias is None else self.matmul(x) + self.bias

    def matmul(self, x: Tensor, recompute_input: RecomputeInput = None) -> Tensor:
        """Compute x Wᵀ only, for a caller whose next kernel adds the bias."""
        if self.fp8 is not None:
            return fp8.column_linear(x, self.weight, self.tp, self.gradients, self.fp8)
        return column_linear(x, self.weight, None, self.tp, self.gradients, self.linear, recompute_input)


class LMHead(nn.Module):
    """The logits of the vocabulary, or the loss, for which logits are computed in chunks; never in FP8.

    y = x Wᵀ + b, with b in a model with `head_bias`.
    """

    def __init__(self, rt: Runtime, name: str) -> None:
        super().__init__()
        self.tp = rt.tp
        self.gradients = rt.weight_gradients
        self.weight = rt.new_param(name + ".weight")
        self.bias = rt.new_param(name + ".bias") if rt.spec.head_bias else None
        self.vocab = rt.spec.vocab
        self.linear = rt.kernels.linear
        self.kernel = rt.kernels.cross_entropy

    def forward(
        self,
        x: Tensor,
        target_T: Tensor | None = None,
        gradient: float | None = None,
        loss_weight_T: Tensor | None = None,
    ) -> Tensor:
        """Return this rank's logits, (T, V); with targets, the summed loss of the tokens in nats.

        Args:
            gradient, loss_weight_T: gradient of that sum, and weights of its terms; see `head_loss`.
        """
        if target_T is None:
            return column_linear(x, self.weight, self.bias, self.tp, self.gradients, self.linear)
        return head_loss(
            x,
            self.weight,
            target_T,
            vocab=self.vocab,
            tp=self.tp,
            gradients=self.gradients,
            kernel=self.kernel,
            linear=self.linear,
            gradient=gradient,
            bias_V=self.bias,
            loss_weight_T=loss_weight_T,
        )

    def token_losses(self, x: Tensor, target_T: Tensor) -> Tensor:
        """Return the loss of every token in nats, (T,), without gradients."""
        return token_losses(
            x,
            self.weight,
            target_T,
            vocab=self.vocab,
            tp=self.tp,
            kernel=self.kernel,
            linear=self.linear,
            bias_V=self.bias,
        )


class MaskedLMHead(LMHead):
    """The head of an encoder: logits = norm(gelu(x W₁ᵀ + b₁)) Wᵀ + b (arXiv:1810.04805, its code)."""

    def __init__(self, rt: Runtime, name: str) -> None:
        super().__init__(rt, name)
        self.dense = ReplicatedLinear(rt, name + ".dense")
        self.norm = build_norm(rt, name + ".norm")
        self.approximate: Literal["none", "tanh"] = "none" if rt.spec.head_transform == "gelu_erf" else "tanh"
        self.bias_gelu = rt.kernels.bias_gelu

    def forward(
        self,
        x: Tensor,
        target_T: Tensor | None = None,
        gradient: float | None = None,
        loss_weight_T: Tensor | None = None,
    ) -> Tensor:
        return super().forward(self._transform(x), target_T, gradient, loss_weight_T)

    def token_losses(self, x: Tensor, target_T: Tensor) -> Tensor:
        return super().token_losses(self._transform(x), target_T)

    def _transform(self, x: Tensor) -> Tensor:
        return self.norm(self.bias_gelu(self.dense.matmul(x), self.dense.bias, self.approximate))


class ReplicatedLinear(nn.Module):
    """y = x Wᵀ + b with W and b whole on every rank, which computes it for the tokens that it holds."""

    def __init__(self, rt: Runtime, name: str) -> None:
        super().__init__()
        self.weight = rt.new_param(name + ".weight")
        self.bias = rt.new_param(name + ".bias") if rt.spec.bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def matmul(self, x: Tensor) -> Tensor:
        """Compute x Wᵀ only, for a caller whose next kernel adds the bias."""
        return F.linear(x, self.weight)


class RowLinear(nn.Module):
    """y = x Wᵀ + b with the columns of W split over tp: slices of the input, the whole sum on every rank.

    b is whole on every rank and added once, after the sum.
    """

    def __init__(self, rt: Runtime, name: str, *, bias: bool) -> None:
        super().__init__()
        self.tp = rt.tp
        self.gradients = rt.weight_gradients
        self.weight = rt.new_param(name + ".weight")
        self.bias = rt.new_param(name + ".bias") if bias else None
        self.fp8 = rt.fp8
        self.linear = rt.kernels.linear

    def forward(self, x: Tensor, recompute_input: RecomputeInput = None) -> Tensor:
        if self.fp8 is None:
            y = row_linear(x, self.weight, self.tp, self.gradients, self.linear, recompute_input)
        else:
            y = fp8.row_linear(x, self.weight, self.tp, self.gradients, self.fp8)
        return y if self.bias is None else y + self.bias


class VocabEmbedding(nn.Module):
    """Embedding lookup in a table whose rows are split over tp.

    A rank contributes zero for tokens of other ranks.
    """

    def __init__(self, rt: Runtime, name: str) -> None:
        super().__init__()
        self.tp = rt.tp
        self.gradients = rt.weight_gradients
        self.weight = rt.new_param(name + ".weight")

    def forward(self, token_T: Tensor) -> Tensor:
        if self.tp.size == 1 and not torch.is_grad_enabled():
            return F.embedding(token_T, self.weight)  # a decoded token costs little else on a CPU
        rows = self.weight.shape[0]
        local_T = token_T - self.tp.rank * rows
        is_local_T = (local_T >= 0) & (local_T < rows)
        return vocab_embedding(local_T.clamp(0, rows - 1), is_local_T, self.weight, self.tp, self.gradients)


class ReplicatedEmbedding(nn.Module):
    """Embedding lookup of positions or token types in a small table, whole on every rank."""

    def __init__(self, rt: Runtime, name: str) -> None:
        super().__init__()
        self.weight = rt.new_param(name + ".weight")

    def forward(self, index_T: Tensor) -> Tensor:
        return F.embedding(index_T, self.weight)


class RMSNorm(nn.Module):
    """x / rms(x) · weight, or · (1 + weight) in a model with `norm_1p`."""

    def __init__(self, rt: Runtime, name: str) -> None:
        super().__init__()
        self.eps = rt.spec.norm_eps
        self.weight_plus_one = rt.spec.norm_1p
        self.kernels = rt.kernels
        self.weight = rt.new_param(name + ".weight")

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.kernels.rms_norm(x_TD, self.weight + 1 if self.weight_plus_one else self.weight, self.eps)

    def add_and_norm(self, x_TD: Tensor, residual_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return x + residual, and its norm."""
        weight_D = self.weight + 1 if self.weight_plus_one else self.weight
        return self.kernels.add_rms_norm(x_TD, residual_TD, weight_D, self.eps)


class LayerNorm(nn.Module):
    """(x - mean) / deviation · weight + bias, or · (1 + weight) in a model with `norm_1p`.

    There is no bias in a model without `norm_bias`; the kernels then add zeros.
    """

    def __init__(self, rt: Runtime, name: str) -> None:
        super().__init__()
        self.eps = rt.spec.norm_eps
        self.weight_plus_one = rt.spec.norm_1p
        self.kernels = rt.kernels
        self.weight = rt.new_param(name + ".weight")
        self.bias = rt.new_param(name + ".bias") if rt.spec.norm_bias else None

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.kernels.layer_norm(
            x_TD, self.weight + 1 if self.weight_plus_one else self.weight, self._shift(), self.eps
        )

    def add_and_norm(self, x_TD: Tensor, residual_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return x + residual, and its norm."""
        weight_D = self.weight + 1 if self.weight_plus_one else self.weight
        return self.kernels.add_layer_norm(x_TD, residual_TD, weight_D, self._shift(), self.eps)

    def _shift(self) -> Tensor:
        return torch.zeros_like(self.weight) if self.bias is None else self.bias


def build_norm(rt: Runtime, name: str) -> RMSNorm | LayerNorm:
    """Build the norm that the model's spec names."""
    return RMSNorm(rt, name) if rt.spec.norm == "rmsnorm" else LayerNorm(rt, name)


def dropout_add_norm(
    norm: RMSNorm | LayerNorm, drop: DropoutFn, site: str, x_TD: Tensor, residual_TD: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply dropout to x and add the residual; return the sum and its norm. One kernel without dropout."""
    if drop is no_dropout:
        return norm.add_and_norm(x_TD, residual_TD)
    sum_TD = drop(site, x_TD, residual_TD)
    return sum_TD, norm(sum_TD)


def sinusoids(
    position_T: Tensor,
    width: int,
    angles: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = reference.angles,
) -> Tensor:
    """Return fairseq's sinusoidal positions: (T, width) float32, sines first, then cosines.

    fairseq counts positions from its padding id + 1, which is 2 in every dictionary it makes.
    """
    half = width // 2
    step = -torch.log(torch.tensor(10000.0, device=position_T.device)) / (half - 1)
    freq = (torch.arange(half, device=position_T.device, dtype=torch.float32) * step).exp()
    cos, sin = angles(position_T + 2, freq)
    return torch.cat((sin, cos), -1)
