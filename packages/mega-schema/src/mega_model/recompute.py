"""Computes again in backward what forward did not keep (arXiv:1604.06174, arXiv:2205.05198 §5).

What is run again gives the same bits: nothing in the model draws random numbers (`dropout`), and exchanges
between ranks are made again in the same order on all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from mega_model.attention_backends import AttentionBackend
from mega_model.attention_mask import PLAIN, AttentionMask
from mega_model.distributed.mesh import Axis


def recompute(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """What the function gives. Of it only what is given is kept, and backward calls it once more."""
    if not torch.is_grad_enabled():
        return function(*inputs)
    output: Tensor = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
    return output


def recompute_sharded(function: Callable[[Tensor], Tensor], x_TD: Tensor, tp: Axis) -> Tensor:
    """The same where all ranks of tp are given the same x: each keeps a share, and backward gathers it."""
    tokens = replace(tp, sequence=True)
    with saved_tensors_hooks(
        lambda x: tokens.local_shard(x).clone(), lambda share: tokens.enter(share).wait()
    ):
        return recompute(function, x_TD)


def recompute_closure(
    enabled: bool, function: Callable[..., Tensor], *inputs: Tensor
) -> Callable[[], Tensor] | None:
    """Return what a linear layer takes as `again`: it computes the layer's input, function(*inputs).

    None, where recomputation is not enabled, keeps the input. The function must give the same bits each time.
    Its own backward keeps `inputs` already, so nothing more is kept.
    """
    return (lambda: function(*inputs)) if enabled and torch.is_grad_enabled() else None


@dataclass(frozen=True, slots=True)
class RecomputedAttention:
    """An `Attend` of which only q, k and v are kept."""

    attend: AttentionBackend

    def __call__(
        self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, mask: AttentionMask = PLAIN
    ) -> Tensor:
        return recompute(lambda q, k, v: self.attend(layer, q, k, v, mask), q_TNH, k_TKH, v_TKH)
