"""Cross-entropy over a vocabulary that no rank holds whole."""

from __future__ import annotations

import torch
from torch import Tensor

from mega_model.mesh import Axis

IGNORED = -100


def token_loss(logits_TV: Tensor, target_T: Tensor, *, vocab: int, tp: Axis) -> Tensor:
    """Cross-entropy of every token, in nats, without gathering the vocabulary.

    log Σ exp(z) - z[target], the maximum and then both terms reduced over tp, two numbers per token
    (arXiv:1909.08053 §3). The work is float32 whatever the logits are.

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
    if target_T.device.type == "cpu":
        wrong = target_T[(target_T != IGNORED) & ((target_T < 0) | (target_T >= vocab))]
        if wrong.numel():
            raise IndexError(f"target {int(wrong[0])} in a vocabulary of {vocab}")
    return _TokenLoss.apply(logits_TV, target_T, vocab, tp)


class _TokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, logits_TV: Tensor, target_T: Tensor, vocab: int, tp: Axis
    ) -> Tensor:
        first = tp.rank * logits_TV.shape[1]
        true_columns = max(0, min(vocab - first, logits_TV.shape[1]))
        z_TV = logits_TV.to(torch.float32, copy=True)
        z_TV[:, true_columns:] = -torch.inf
        z_TV -= tp.reduce(z_TV.amax(1), "max")[:, None]
        local_T = target_T - first
        mine_T = (local_T >= 0) & (local_T < true_columns)
        local_T = torch.where(mine_T, local_T, 0)
        at_target_T = torch.where(mine_T, z_TV.gather(1, local_T[:, None])[:, 0], 0.0)
        exp_TV = z_TV.exp_()
        sum_T, at_target_T = tp.reduce(torch.stack((exp_TV.sum(1), at_target_T)))
        counts_T = target_T != IGNORED
        ctx.save_for_backward(exp_TV, sum_T, local_T, mine_T, counts_T)
        ctx.dtype = logits_TV.dtype  # type: ignore[attr-defined]
        return torch.where(counts_T, sum_T.log() - at_target_T, 0.0)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        exp_TV, sum_T, local_T, mine_T, counts_T = ctx.saved_tensors  # type: ignore[attr-defined]
        grad_T = grads[0] * counts_T
        grad_TV = exp_TV.mul_((grad_T / sum_T)[:, None])  # in its place: there is no larger tensor
        grad_TV.scatter_add_(1, local_T[:, None], (-grad_T * mine_T)[:, None])
        return grad_TV.to(ctx.dtype), None, None, None  # type: ignore[attr-defined]
