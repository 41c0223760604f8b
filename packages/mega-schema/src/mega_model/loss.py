"""Cross-entropy over a vocabulary that no rank holds whole, and of which the scores need not exist at once.

Legend: T tokens; C of them at a time; D hidden; V this rank's columns of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mega_model.kernels.record import CrossEntropy
from mega_model.kernels.reference import IGNORED as IGNORED
from mega_model.kernels.reference import cross_entropy
from mega_model.mesh import Axis
from mega_model.products import computing_dtype
from mega_model.weight_gradients import WeightGradients
from mega_schema.chunk import loss_chunk, loss_tokens


def token_loss(
    logits_TV: Tensor, target_T: Tensor, *, vocab: int, tp: Axis, kernel: CrossEntropy = cross_entropy
) -> Tensor:
    """Cross-entropy of every token, in nats, without gathering the vocabulary.

    log Σ exp(z) - z[target], reduced over tp as a few numbers per token (arXiv:1909.08053 §3). The work is
    float32 whatever the logits are.

    Args:
        logits_TV: this rank's slice of the vocabulary, padding columns included.
        target_T: global ids in [0, vocab), or -100 for a token that does not count.
        vocab: size without padding; padding columns get no probability and no gradient.

    Returns:
        (T,) float32, the same on every rank of tp, zero where the target is -100.

    Raises:
        IndexError: a target is outside the vocabulary. Checked on the CPU only: on a GPU it would cost a
            synchronisation per step.
    """
    _check(target_T, vocab)
    return _TokenLoss.apply(logits_TV, target_T, vocab, tp, kernel)


def head_loss(
    x_TD: Tensor,
    weight_VD: nn.Parameter,
    target_T: Tensor,
    *,
    vocab: int,
    tp: Axis,
    gradients: WeightGradients,
    kernel: CrossEntropy = cross_entropy,
) -> Tensor:
    """Sum over the tokens of the cross-entropy of x Wᵀ, in nats; the logits exist for a few tokens at a time.

    Forward computes the gradients too, while it has a chunk's logits, and so three products in all, as if
    the logits were kept (arXiv:2410.10989 §3.2). Backward scales what is there by the gradient of the sum.
    Until then the weight's gradient is held in float32 beside the main one. So large a chunk is: its logits
    take no more than that.

    Args:
        x_TD: what the head multiplies, as `column_linear` takes it.
        weight_VD, vocab, tp: this rank's rows of the head; rows of padding give no probability.
        target_T: of the tokens of all ranks of tp; as `token_loss` takes it, and with its errors.

    Returns:
        a float32 number, the same on every rank of tp.
    """
    _check(target_T, vocab)
    return _HeadLoss.apply(x_TD, weight_VD, target_T, vocab, tp, gradients, kernel, torch.is_grad_enabled())


def _check(target_T: Tensor, vocab: int) -> None:
    if target_T.device.type == "cpu":
        wrong = target_T[(target_T != IGNORED) & ((target_T < 0) | (target_T >= vocab))]
        if wrong.numel():
            raise IndexError(f"target {int(wrong[0])} in a vocabulary of {vocab}")


def _own(target_T: Tensor, columns: int, vocab: int, tp: Axis) -> tuple[Tensor, int]:
    """Targets as this rank's columns, -1 where they are another's, IGNORED kept; and how many are true."""
    first = tp.rank * columns
    true = max(0, min(vocab - first, columns))
    local_T = target_T - first
    local_T = torch.where((local_T >= 0) & (local_T < true), local_T, -1)
    return torch.where(target_T == IGNORED, IGNORED, local_T), true


class _TokenLoss(torch.autograd.Function):
    """Makes the gradient with the loss, a few tokens at a time, and keeps it in place of the logits."""

    @staticmethod
    def forward(
        ctx: Any, logits_TV: Tensor, target_T: Tensor, vocab: int, tp: Axis, kernel: CrossEntropy
    ) -> Tensor:
        tokens, columns = logits_TV.shape
        local_T, true = _own(target_T, columns, vocab, tp)
        loss_T = logits_TV.new_empty(tokens, dtype=torch.float32)
        grad_TV = torch.empty_like(logits_TV) if ctx.needs_input_grad[0] else None
        for some in _chunks(tokens, (1 << (18 if logits_TV.device.type == "cpu" else 25)) // columns):
            if grad_TV is None:
                loss_T[some] = kernel(logits_TV[some, :true].clone(), local_T[some], tp, None)
            else:
                work_CV = grad_TV[some, :true].copy_(logits_TV[some, :true])
                loss_T[some] = kernel(work_CV, local_T[some], tp, 1.0)
        if grad_TV is not None:
            grad_TV[:, true:] = 0
            ctx.save_for_backward(grad_TV)
        return loss_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor | None, ...]:
        (grad_TV,) = ctx.saved_tensors
        return grad_TV.mul_(grad_T[:, None]), None, None, None, None


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weight_VD: nn.Parameter,
        target_T: Tensor,
        vocab: int,
        tp: Axis,
        gradients: WeightGradients,
        kernel: CrossEntropy,
        differentiating: bool,
    ) -> Tensor:
        needs_x, needs_weight = (differentiating and needed for needed in ctx.needs_input_grad[:2])
        local_T, true = _own(target_T, weight_VD.shape[0], vocab, tp)
        whole_TD, dtype = tp.enter(x_TD).wait(), computing_dtype(x_TD)
        whole_TD, true_VD = whole_TD.to(dtype), weight_VD[:true].to(dtype)
        tokens, width = whole_TD.shape
        step = loss_chunk(tokens, loss_tokens(width, dtype.itemsize))
        logits_CV = whole_TD.new_empty((step, true))
        loss_T = whole_TD.new_empty(tokens, dtype=torch.float32)
        grad_TD = torch.empty_like(whole_TD) if needs_x else None
        grad_VD = torch.empty_like(weight_VD, dtype=torch.float32) if needs_weight else None
        # a small probability is zero in float16
        scale = (1024.0 if dtype == torch.float16 else 1.0) if needs_x or needs_weight else None
        for some in _chunks(tokens, step):
            x_CD = whole_TD[some]
            z_CV = torch.mm(x_CD, true_VD.t(), out=logits_CV[: len(x_CD)])
            loss_T[some] = kernel(z_CV, local_T[some], tp, scale)
            if grad_TD is not None:
                torch.mm(z_CV, true_VD, out=grad_TD[some])
            if grad_VD is not None:
                gradients.add_product(grad_VD[:true], z_CV, x_CD, first=some.start == 0)
        if grad_VD is not None:
            grad_VD[true:] = 0
        grad_x = None if grad_TD is None else tp.leave(grad_TD.to(x_TD.dtype)).wait()
        ctx.save_for_backward(grad_x, grad_VD)
        ctx.weight, ctx.gradients, ctx.scale = weight_VD, gradients, scale
        return loss_T.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_VD = ctx.saved_tensors
        grad = grad / ctx.scale
        grad_weight = None if grad_VD is None else ctx.gradients.add_made(ctx.weight, grad_VD, grad)
        return None if grad_x is None else grad_x * grad, grad_weight, *[None] * 6


def _chunks(tokens: int, step: int) -> Iterator[slice]:
    return (slice(begin, begin + max(1, step)) for begin in range(0, tokens, max(1, step)))
