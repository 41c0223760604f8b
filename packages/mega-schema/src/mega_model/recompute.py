"""Activation recomputation (arXiv:1604.06174, arXiv:2205.05198 §5).

Recomputation gives the same bits: nothing in the model draws random numbers (`dropout`), and all ranks repeat
their collectives in the same order.
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
    """Call a function, keep only its inputs, and recompute its output in backward."""
    if not torch.is_grad_enabled():
        return function(*inputs)
    output: Tensor = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
    return output


def recompute_sharded(function: Callable[[Tensor], Tensor], x_TD: Tensor, tp: Axis) -> Tensor:
    """Call `recompute` with an input that is whole on all ranks of tp: each saves only its shard.

    Backward all-gathers the shards.
    """
    tokens = replace(tp, sequence=True)
    with saved_tensors_hooks(
        lambda x: tokens.local_shard(x).clone(), lambda shard: tokens.enter(shard).wait()
    ):
        return recompute(function, x_TD)


def recompute_closure(
    enabled: bool, function: Callable[..., Tensor], *inputs: Tensor
) -> Callable[[], Tensor] | None:
    """Return a function that recomputes a linear layer's input, function(*inputs), in backward.

    None if recomputation is disabled: then the layer saves its input. `function` must give the same bits each
    time. Its own backward keeps `inputs` anyway, so no extra memory is used.
    """
    return (lambda: function(*inputs)) if enabled and torch.is_grad_enabled() else None


@dataclass(frozen=True, slots=True)
class RecomputedAttention:
    """An attention backend that saves only q, k and v, and recomputes the rest in backward."""

    attend: AttentionBackend

    def __call__(
        self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, mask: AttentionMask = PLAIN
    ) -> Tensor:
        return recompute(lambda q, k, v: self.attend(layer, q, k, v, mask), q_TNH, k_TKH, v_TKH)
