"""Matrix products of tensor parallelism as autograd functions: arXiv:1909.08053 §3, arXiv:2205.05198 §4.2.

Between forward and backward a layer keeps its input as this rank holds it: with sequence parallelism a shard
of the tokens, which backward gathers again. Backward starts each collective first and computes during it:
tokens are gathered while the input's gradient is computed, that gradient is reduced while the weight's is
computed. Weight gradients go where `WeightGradients` says. On a fused axis (--tp-comm-overlap), a collective
with no other work to overlap is fused with its product in one operation, which torch splits to overlap them.

Legend: T tokens (with sequence parallelism, outside a region, this rank's shard of them); I, O this rank's
widths; V its rows of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mega_model.distributed.mesh import Axis
from mega_model.kernels.interface import Linear, OrderedLinear
from mega_model.kernels.products import linear
from mega_model.weight_gradients import WeightGradients


def column_linear(
    x_TI: Tensor,
    weight_OI: nn.Parameter,
    bias_O: Tensor | None,
    tp: Axis,
    gradients: WeightGradients,
    matmul: Linear = linear,
    recompute_input: Callable[[], Tensor] | None = None,
) -> Tensor:
    """Compute x Wᵀ + b, (T, O): every rank takes all tokens and returns its slice of the output.

    Megatron's f; with sequence parallelism its g.

    Args:
        recompute_input: recomputes x; if given, backward calls it and x is not saved.
    """
    if not torch.is_grad_enabled():
        return _all_gather_matmul(x_TI, weight_OI, bias_O, tp, matmul)[1]
    return _apply(_ColumnLinear, x_TI, weight_OI, bias_O, tp, gradients, matmul, recompute_input)


def row_linear(
    x_TI: Tensor,
    weight_OI: nn.Parameter,
    tp: Axis,
    gradients: WeightGradients,
    matmul: Linear = linear,
    recompute_input: Callable[[], Tensor] | None = None,
) -> Tensor:
    """Compute x Wᵀ summed over the ranks, (T, O): every rank takes its slice of the input.

    Megatron's g; with sequence parallelism its ḡ, and a rank gets its shard of the tokens.

    Args:
        recompute_input: as for `column_linear`.
    """
    if not torch.is_grad_enabled():
        return _matmul_reduce_scatter(x_TI, weight_OI, tp, matmul)
    return _apply(_RowLinear, x_TI, weight_OI, tp, gradients, matmul, recompute_input)


def vocab_embedding(
    local_T: Tensor, is_local_T: Tensor, weight_VD: nn.Parameter, tp: Axis, gradients: WeightGradients
) -> Tensor:
    """Look up each token's row of the whole table, (T, D); every rank contributes the rows it holds.

    Args:
        local_T: row in this rank's shard of the table; any valid row for a token of another rank.
        is_local_T: whether the token is in this rank's shard.
    """
    return _apply(_VocabEmbedding, local_T, is_local_T, weight_VD, tp, gradients)


def select_tokens(x_TD: Tensor, token_B: Tensor, tp: Axis) -> tuple[Tensor, Tensor]:
    """Select tokens by their index on the whole token axis, of those that this rank holds.

    Returns:
        (B, D), any token where another rank holds the wanted one; (B,) bool, whether this rank holds it.
    """
    tokens = x_TD.shape[0]
    local_B = token_B - (tp.rank * tokens if tp.sequence else 0)
    is_local_B = (local_B >= 0) & (local_B < tokens)
    return x_TD[local_B.clamp(0, tokens - 1)], is_local_B


def sum_selected(y_BO: Tensor, is_local_B: Tensor, tp: Axis) -> Tensor:
    """Return every selected token's output, (B, O), on all ranks; each contributes those that it holds.

    Backward gives a rank the gradients of its own tokens. The gradients of weights between `select_tokens`
    and this are therefore partial with sequence parallelism, as those of a norm are.
    """
    return _apply(_SumSelected, y_BO * is_local_B[:, None], tp) if tp.sequence else y_BO


def _all_gather_matmul(
    x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, tp: Axis, matmul: Linear
) -> tuple[Tensor, Tensor]:
    """Gather the tokens of all ranks; return them, and x Wᵀ + b of them."""
    if not tp.fused:
        whole_TI = tp.enter(x_TI).wait()
        return whole_TI, matmul(whole_TI, weight_OI, bias_O)
    assert tp.group is not None
    symmetric = torch.ops.symm_mem
    whole_TI, (y_TO,) = symmetric.fused_all_gather_matmul(x_TI, [weight_OI.t()], 0, tp.group.group_name)
    return whole_TI, y_TO if bias_O is None else y_TO + bias_O


def _matmul_reduce_scatter(x_TI: Tensor, weight_OI: Tensor, tp: Axis, matmul: Linear) -> Tensor:
    """Compute x Wᵀ summed over the ranks; return this rank's tokens of it."""
    if isinstance(matmul, OrderedLinear):
        return matmul.reduce_product(x_TI, weight_OI, tp)
    if not tp.fused:
        return tp.leave(matmul(x_TI, weight_OI)).wait()
    assert tp.group is not None
    return torch.ops.symm_mem.fused_matmul_reduce_scatter(x_TI, weight_OI.t(), "sum", 0, tp.group.group_name)


def _apply(function: type[torch.autograd.Function], *inputs: object) -> Tensor:
    return function.apply(*inputs)


def _save_input(ctx: Any, x_TI: Tensor, recompute_input: Callable[[], Tensor] | None) -> None:
    """Save the layer's input for backward, or the function that recomputes it."""
    ctx.recompute_input = recompute_input
    if recompute_input is None:
        ctx.save_for_backward(x_TI)


def _restore_input(ctx: Any) -> Callable[[], Tensor]:
    """Return a function that gives the layer's input in backward; the layer drops its own reference to it."""
    if ctx.recompute_input is None:
        (x_TI,) = ctx.saved_tensors
        return lambda: x_TI
    recompute_input = ctx.recompute_input
    ctx.recompute_input = None
    return recompute_input


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TI: Tensor,
        weight_OI: nn.Parameter,
        bias_O: Tensor | None,
        tp: Axis,
        gradients: WeightGradients,
        matmul: Linear,
        recompute_input: Callable[[], Tensor] | None,
    ) -> Tensor:
        _save_input(ctx, x_TI, recompute_input)
        ctx.weight = weight_OI
        ctx.tp = tp
        ctx.gradients = gradients
        ctx.matmul = matmul
        return _all_gather_matmul(x_TI, weight_OI, bias_O, tp, matmul)[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
        x_TI = _restore_input(ctx)
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        tp = ctx.tp
        gradients = ctx.gradients
        weight = ctx.weight
        # Overlap: start to gather x now, while the input's gradient is computed below. A deferred weight
        # gradient gathers only when it runs.
        x: Callable[[], Tensor] = lambda: tp.enter(x_TI()).wait()  # noqa: E731
        if needs_weight and not gradients.is_deferring:
            x = tp.enter(x_TI()).wait
        grad_x = tp.leave(ctx.matmul(grad_TO, weight.t())) if needs_x else None
        grad_weight = gradients.accumulate(weight, x, grad_TO) if needs_weight else None
        grad_bias = grad_TO.sum(0) if needs_bias else None
        return None if grad_x is None else grad_x.wait(), grad_weight, grad_bias, *[None] * 4


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TI: Tensor,
        weight_OI: nn.Parameter,
        tp: Axis,
        gradients: WeightGradients,
        matmul: Linear,
        recompute_input: Callable[[], Tensor] | None,
    ) -> Tensor:
        _save_input(ctx, x_TI, recompute_input)
        ctx.weight = weight_OI
        ctx.tp = tp
        ctx.gradients = gradients
        ctx.matmul = matmul
        return _matmul_reduce_scatter(x_TI, weight_OI, tp, matmul)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
        x_TI = _restore_input(ctx)
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        if needs_x:
            grad_TO, grad_x = _all_gather_matmul(grad_TO, ctx.weight.t(), None, ctx.tp, ctx.matmul)
        else:
            grad_TO = ctx.tp.enter(grad_TO).wait()
            grad_x = None
        grad_weight = ctx.gradients.accumulate(ctx.weight, x_TI, grad_TO) if needs_weight else None
        return grad_x, grad_weight, *[None] * 4


class _VocabEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        local_T: Tensor,
        is_local_T: Tensor,
        weight_VD: nn.Parameter,
        tp: Axis,
        gradients: WeightGradients,
    ) -> Tensor:
        ctx.save_for_backward(local_T, is_local_T)
        ctx.weight = weight_VD
        ctx.tp = tp
        ctx.gradients = gradients
        x_TD = F.embedding(local_T, weight_VD)
        return tp.leave(x_TD.mul_(is_local_T[:, None])).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        local_T, is_local_T = ctx.saved_tensors
        grad_TD = ctx.tp.enter(grad_TD).wait() * is_local_T[:, None]
        return None, None, ctx.gradients.accumulate_rows(ctx.weight, local_T, grad_TD), None, None


class _SumSelected(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_BO: Tensor, tp: Axis) -> Tensor:
        return tp.reduce(y_BO.clone())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BO: Tensor) -> tuple[Tensor, None]:
        return grad_BO, None
