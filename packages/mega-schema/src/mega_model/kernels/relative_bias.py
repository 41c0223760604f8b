"""T5's learned bias of attention scores, by the distance from query to key (arXiv:1910.10683 §2.1).

The bias depends on the distance only, so a kernel gets one number per head and distance, expands them to the
scores of a row for as long as it runs, and sums the gradient over the rows of the batch.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_model.kernels.interface import Visible
from mega_model.kernels.reference import to_attention_dtype


def relative_buckets(
    buckets: int, max_distance: int, *, causal: bool, device: torch.device | None = None
) -> Tensor:
    """Return the bucket of each distance from query to key, -max_distance to max_distance tokens, (D,).

    Half of the buckets are for one distance each, the others for ranges that grow with its logarithm. If not
    causal, keys after the query have the second half of the table.
    """
    distance_D = torch.arange(-max_distance, max_distance + 1, device=device)
    first_D = torch.zeros_like(distance_D)
    if causal:
        distance_D = (-distance_D).clamp(min=0)
    else:
        buckets //= 2
        first_D = (distance_D > 0).long() * buckets
        distance_D = distance_D.abs()
    exact = buckets // 2
    # float32 and this order of operations decide the rounding at the edges of the ranges, as in transformers
    ratio_D = torch.log(distance_D.float() / exact) / math.log(max_distance / exact)
    ranges_D = exact + (ratio_D.clamp(min=0) * (buckets - exact)).long()
    return first_D + torch.where(distance_D < exact, distance_D, ranges_D.clamp(max=buckets - 1))


def relative_attention(
    q_BNsH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, visible: Visible, bias_ND: Tensor
) -> Tensor:
    """Compute softmax(q kᵀ / √H + bias) v over the visible keys, (B, N, s, H); torch chooses the algorithm.

    Args:
        visible: a boolean mask, "before" or None, as in `interface`.
        bias_ND: bias of each head, float32, by the distance from query to key, see `AttentionMask`.
    """
    q, k, v = (to_attention_dtype(x) for x in (q_BNsH, k_BKSH, v_BKSH))
    queries, keys = q.shape[2], k.shape[2]
    bias_1NsS = expand_bias(bias_ND, queries, keys)[None]
    if isinstance(visible, str):
        visible = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril()
    if visible is not None:
        bias_1NsS = bias_1NsS.masked_fill(~visible, -torch.inf)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=bias_1NsS.to(q.dtype), enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.to(q_BNsH.dtype)


def expand_bias(bias_ND: Tensor, queries: int, keys: int) -> Tensor:
    """Return the bias of every score, (N, s, S), of queries and keys that begin at one position."""
    row_NW = bias_ND[:, _distance_index(bias_ND.shape[1], queries, keys, bias_ND.device)]
    return row_NW.unfold(1, keys, 1).flip(1)


def reduce_bias_gradient(grad_NsS: Tensor, distances: int) -> Tensor:
    """Return the gradient of `expand_bias`: its sum for each distance, (N, D)."""
    heads, queries, keys = grad_NsS.shape
    width = queries + keys - 1
    # row i begins at column s - 1 - i of a wider table, whose columns have one distance each
    wide_NsW = grad_NsS.new_zeros(heads, queries, width)
    strides = queries * width, width - 1, 1
    wide_NsW.as_strided(grad_NsS.shape, strides, queries - 1).copy_(grad_NsS)
    sums_NW = wide_NsW.sum(1)
    index_W = _distance_index(distances, queries, keys, grad_NsS.device)
    return grad_NsS.new_zeros(heads, distances).index_add_(1, index_W, sums_NW)


def _distance_index(distances: int, queries: int, keys: int, device: torch.device) -> Tensor:
    """Return the column of `bias_ND` of each distance from 1 - s to S - 1."""
    farthest = (distances - 1) // 2
    return torch.arange(1 - queries, keys, device=device).clamp(-farthest, farthest) + farthest
