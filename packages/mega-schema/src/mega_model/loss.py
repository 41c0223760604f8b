"""Cross-entropy over a vocabulary split over tp, with the logits computed in chunks of tokens.

Legend: T tokens; C of them at a time; D hidden; V this rank's columns of the vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mega_model.distributed.mesh import Axis
from mega_model.kernels.interface import CrossEntropy, Linear, OrderedLinear
from mega_model.kernels.products import linear
from mega_model.kernels.reference import IGNORED as IGNORED
from mega_model.kernels.reference import cross_entropy
from mega_model.matmul_precision import matmul_dtype
from mega_model.weight_gradients import WeightGradients
from mega_schema.loss_chunking import chunk_tokens, max_chunk_tokens


def head_loss(
    x_TD: Tensor,
    weight_VD: nn.Parameter,
    target_T: Tensor,
    *,
    vocab: int,
    tp: Axis,
    gradients: WeightGradients,
    kernel: CrossEntropy = cross_entropy,
    linear: Linear = linear,
    gradient: float | None = None,
    bias_V: Tensor | None = None,
    loss_weight_T: Tensor | None = None,
) -> Tensor:
    """Compute the summed cross-entropy of x Wᵀ + b over the tokens, in nats, in chunks of tokens.

    Forward also computes the gradients, while it has a chunk's logits: three products in all, as if the
    logits were kept (arXiv:2410.10989 §3.2). Backward multiplies these gradients by the gradient of the sum.
    Until backward, the weight gradient is kept in a second float32 buffer as large as the main gradient. If
    `gradient` is given and the weight has a main gradient, forward adds to the main gradient directly: always
    in float32, in bfloat16 only if `gradient` is a power of two, in float16 never.

    Args:
        x_TD: input of the head, as for `column_linear`.
        weight_VD, vocab, tp: this rank's rows of the head. Padding rows get no probability and no gradient.
        target_T: targets of the tokens of all ranks of tp: global ids in [0, vocab), or -100 for an ignored
            token.
        gradient: the gradient of the sum that backward will receive, if the caller knows it.
        bias_V: this rank's entries of b, padding included; None: there is no bias.
        loss_weight_T: factor of the loss of each token, float32; None: 1.

    Returns:
        a float32 number, the same on every rank of tp.

    Raises:
        IndexError: a target is outside the vocabulary. Checked on the CPU only: on a GPU it would cost a
            synchronisation per step.
        RuntimeError: forward has added the weight's gradient, and backward received another gradient than
            `gradient`.
    """
    _check_targets(target_T, vocab)
    options = vocab, tp, gradients, (kernel, linear), gradient, torch.is_grad_enabled()
    return _HeadLoss.apply(x_TD, weight_VD, bias_V, target_T, *options, loss_weight_T)


@torch.no_grad()
def token_losses(
    x_TD: Tensor,
    weight_VD: nn.Parameter,
    target_T: Tensor,
    *,
    vocab: int,
    tp: Axis,
    kernel: CrossEntropy = cross_entropy,
    linear: Linear = linear,
    bias_V: Tensor | None = None,
) -> Tensor:
    """Compute the cross-entropy of every token, (T,) float32, without gradients.

    Args and errors: as for `head_loss`.
    """
    _check_targets(target_T, vocab)
    local_T, columns_in_vocab = _local_targets(target_T, weight_VD.shape[0], vocab, tp)
    dtype = _logits_dtype(x_TD, linear)
    whole_TD = tp.enter(x_TD).wait().to(dtype)
    used_VD = weight_VD[:columns_in_vocab].to(dtype)
    used_V = None if bias_V is None else bias_V[:columns_in_vocab].to(dtype)
    step = chunk_tokens(len(whole_TD), max_chunk_tokens(whole_TD.shape[1], dtype.itemsize))
    chunks = zip(whole_TD.split(step), local_T.split(step), strict=True)
    return torch.cat([kernel(linear(x_CD, used_VD, used_V), local_C, tp, None) for x_CD, local_C in chunks])


def _logits_dtype(x_TD: Tensor, linear: Linear) -> torch.dtype:
    """Return the dtype of the logits: that of x for ordered sums, whose bits do not depend on the CPU."""
    return x_TD.dtype if isinstance(linear, OrderedLinear) else matmul_dtype(x_TD)


def _check_targets(target_T: Tensor, vocab: int) -> None:
    if target_T.device.type == "cpu":
        out_of_range = target_T[(target_T != IGNORED) & ((target_T < 0) | (target_T >= vocab))]
        if out_of_range.numel():
            raise IndexError(f"target {int(out_of_range[0])} in a vocabulary of {vocab}")


def _local_targets(target_T: Tensor, columns: int, vocab: int, tp: Axis) -> tuple[Tensor, int]:
    """Map targets to this rank's columns, and count the columns without padding.

    -1 for another rank's target; IGNORED is kept.
    """
    first = tp.rank * columns
    columns_in_vocab = max(0, min(vocab - first, columns))
    local_T = target_T - first
    local_T = torch.where((local_T >= 0) & (local_T < columns_in_vocab), local_T, -1)
    return torch.where(target_T == IGNORED, IGNORED, local_T), columns_in_vocab


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weight_VD: nn.Parameter,
        bias_V: Tensor | None,
        target_T: Tensor,
        vocab: int,
        tp: Axis,
        gradients: WeightGradients,
        kernels: tuple[CrossEntropy, Linear],
        gradient: float | None,
        grad_enabled: bool,
        loss_weight_T: Tensor | None,
    ) -> Tensor:
        needs_x, needs_weight, needs_bias = (grad_enabled and needs for needs in ctx.needs_input_grad[:3])
        local_T, columns_in_vocab = _local_targets(target_T, weight_VD.shape[0], vocab, tp)
        cross_entropy, linear = kernels
        dtype = _logits_dtype(x_TD, linear)
        whole_TD = tp.enter(x_TD).wait().to(dtype)
        used_VD = weight_VD[:columns_in_vocab].to(dtype)
        used_V = None if bias_V is None else bias_V[:columns_in_vocab].to(dtype)
        tokens, width = whole_TD.shape
        loss_T = whole_TD.new_empty(tokens, dtype=torch.float32)
        grad_TD = torch.empty_like(whole_TD) if needs_x else None
        grad_V = torch.zeros_like(bias_V, dtype=torch.float32) if bias_V is not None and needs_bias else None
        # loss scaling: small probabilities underflow in float16
        needs_any = needs_x or needs_weight or needs_bias
        scale = (1024.0 if dtype == torch.float16 else 1.0) if needs_any else None
        # The gradient at the target is about -1. Scaled by anything but a power of two, it is rounded to
        # bfloat16 with the same bias for every token.
        is_exact = gradient is not None and (dtype == torch.float32 or math.frexp(gradient)[0] == 0.5)
        main_VD = gradients.main_grad(weight_VD) if needs_weight and is_exact and scale == 1 else None
        grad_VD = main_VD
        if main_VD is not None:
            scale = gradient
        elif needs_weight:
            grad_VD = torch.empty_like(weight_VD, dtype=torch.float32)

        def compute_chunk(begin: int, end: int) -> None:
            x_CD = whole_TD[begin:end]
            z_CV = linear(x_CD, used_VD, used_V)
            loss_T[begin:end] = cross_entropy(z_CV, local_T[begin:end], tp, scale)
            if loss_weight_T is not None:
                loss_T[begin:end] *= loss_weight_T[begin:end]
                z_CV *= loss_weight_T[begin:end, None].to(z_CV.dtype)
            if grad_TD is not None:
                grad_TD[begin:end] = linear(z_CV, used_VD.t())
            if grad_V is not None:
                grad_V[:columns_in_vocab] += z_CV.sum(0, dtype=torch.float32)
            if grad_VD is not None:
                first = begin == 0 and main_VD is None
                gradients.accumulate_product(grad_VD[:columns_in_vocab], z_CV, x_CD, first=first)

        step = chunk_tokens(tokens, max_chunk_tokens(width, dtype.itemsize))
        for begin in range(0, tokens, step):
            # a function, so that a chunk's logits are freed before the next chunk's exist
            compute_chunk(begin, begin + step)
        if main_VD is not None:
            gradients.mark_accumulated(weight_VD)
            grad_VD = None
        elif grad_VD is not None:
            grad_VD[columns_in_vocab:] = 0
        grad_x = None if grad_TD is None else tp.leave(grad_TD.to(x_TD.dtype)).wait()
        ctx.save_for_backward(grad_x, grad_VD, grad_V)
        ctx.weight = weight_VD
        ctx.gradients = gradients
        ctx.scale = scale
        ctx.grad_accumulated = main_VD is not None
        return loss_T.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_VD, grad_V = ctx.saved_tensors
        if ctx.grad_accumulated:
            if not math.isnan(ctx.scale) and not math.isclose(float(grad), ctx.scale, rel_tol=1e-5):
                raise RuntimeError(f"the gradient of the loss is {float(grad)}, expected {ctx.scale}")
            return grad_x, None, grad_V, *[None] * 8
        grad = grad / ctx.scale
        grad_weight = None if grad_VD is None else ctx.gradients.accumulate_scaled(ctx.weight, grad_VD, grad)
        grad_bias = None if grad_V is None else grad_V * grad
        return None if grad_x is None else grad_x * grad, grad_weight, grad_bias, *[None] * 8
