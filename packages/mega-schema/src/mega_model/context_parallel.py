"""Context parallelism: which tokens of a row a rank holds, and the all-gather of keys and values.

A row of S tokens is cut into 2·cp chunks. Rank r holds chunks r and 2·cp - 1 - r, an early and a late one, so
that a causal mask gives every rank the same number of query-key pairs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mega_model.distributed.mesh import Axis


def token_positions(length: int, cp: Axis, *, device: torch.device | None = None) -> Tensor:
    """Return the positions in the row of this rank's tokens, (S / cp,), in the order it holds them."""
    if cp.size == 1:  # no chunks: the length need not divide
        return torch.arange(length, device=device)
    size = length // (2 * cp.size)
    return torch.cat([torch.arange(end - size, end, device=device) for end in chunk_ends(length, cp)])


def chunk_ends(length: int, cp: Axis) -> tuple[int, int]:
    """Return the end positions in the row of this rank's two chunks."""
    size = length // (2 * cp.size)
    return (cp.rank + 1) * size, (2 * cp.size - cp.rank) * size


def all_gather_kv(x: Tensor, rows: int, cp: Axis) -> Tensor:
    """Gather the keys and values of all tokens of the rows; backward reduce-scatters their gradients.

    Args:
        x: (2, T, K, H), keys and values of this rank's tokens.

    Returns:
        (2, B, K, S, H), tokens by position.
    """
    gathered: Tensor = _AllGatherKV.apply(x, cp)
    ranks = gathered.unflatten(0, (cp.size, 2)).unflatten(2, (rows, 2, -1))
    ordered = torch.cat((ranks[:, :, :, 0], ranks[:, :, :, 1].flip(0)))  # (chunk, 2, B, tokens, K, H)
    return ordered.permute(1, 2, 4, 0, 3, 5).flatten(3, 4)


class _AllGatherKV(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cp: Axis) -> Tensor:
        ctx.cp = cp
        return cp.enter(x).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.cp.leave(grad).wait(), None
