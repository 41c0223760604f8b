"""Cross-entropy over a vocabulary that no rank holds whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

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
    """Keeps the logits as they are and two float32 numbers per token, and makes exp(z) again in backward.

    It is made of a few tokens at a time: the gradient is the one thing here that is as large as the logits.
    """

    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, target_T: Tensor, vocab: int, tp: Axis) -> Tensor:
        tokens, columns = logits_TV.shape
        first = tp.rank * columns
        true_columns = max(0, min(vocab - first, columns))
        true_TV = logits_TV[:, :true_columns]
        local_T = target_T - first
        mine_T = (local_T >= 0) & (local_T < true_columns)
        local_T = torch.where(mine_T, local_T, 0)
        largest_T = logits_TV.new_full((tokens,), -torch.inf, dtype=torch.float32)
        at_target_T, sum_T = torch.zeros_like(largest_T), torch.zeros_like(largest_T)
        if true_columns:  # the last ranks may hold nothing but padding
            largest_T.copy_(true_TV.amax(1))
            at_target_T.copy_(true_TV.gather(1, local_T[:, None])[:, 0])
        largest_T = tp.reduce(largest_T, "max")
        for some in _chunks(logits_TV):
            sum_T[some] = (true_TV[some].float() - largest_T[some, None]).exp_().sum(1)
        at_target_T = torch.where(mine_T, at_target_T - largest_T, 0.0)
        sum_T, at_target_T = tp.reduce(torch.stack((sum_T, at_target_T)))
        counts_T = target_T != IGNORED
        ctx.save_for_backward(logits_TV, largest_T, sum_T, local_T, mine_T, counts_T)
        ctx.true_columns = true_columns
        return torch.where(counts_T, sum_T.log() - at_target_T, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor, None, None, None]:
        logits_TV, largest_T, sum_T, local_T, mine_T, counts_T = ctx.saved_tensors
        grad_T = grad_T * counts_T
        grad_TV = torch.empty_like(logits_TV)
        grad_TV[:, ctx.true_columns :] = 0
        share_T = grad_T / sum_T
        for some in _chunks(logits_TV):
            exp_CV = (logits_TV[some, : ctx.true_columns].float() - largest_T[some, None]).exp_()
            torch.mul(exp_CV, share_T[some, None], out=grad_TV[some, : ctx.true_columns])
        if ctx.true_columns:
            # p - 1 is rounded once; for a token of another rank's this writes what column 0 had
            at_local_T = (logits_TV.gather(1, local_T[:, None])[:, 0].float() - largest_T).exp_() * share_T
            grad_TV.scatter_(1, local_T[:, None], (at_local_T - grad_T * mine_T).to(grad_TV.dtype)[:, None])
        return grad_TV, None, None, None


def _chunks(logits_TV: Tensor) -> Iterator[slice]:
    """Tokens in turn, so many that their float32 logits fit a CPU's cache, or are work enough for a GPU."""
    values = 1 << (18 if logits_TV.device.type == "cpu" else 25)
    tokens, columns = logits_TV.shape
    step = max(1, values // max(1, columns))
    return (slice(begin, begin + step) for begin in range(0, tokens, step))
