"""flash-attn's two functions over pages as its documentation defines them, in plain torch: no GPU is needed.

From the docstrings of flash_attn 2, with d = seqlen_k - seqlen_q: a causal mask is aligned to the lower right
corner; a window of (left, right) shows query i the keys from i + d - left to i + d + right; ALiBi adds
-slope · |i + d - j|.
"""

from __future__ import annotations

import torch
from torch import Tensor


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool,
    window_size: tuple[int, int],
    alibi_slopes: Tensor | None,
    block_table: Tensor,
) -> Tensor:
    """Attend sequence by sequence, over paged keys and values."""
    _check_integers(cu_seqlens_q, cu_seqlens_k, block_table)
    counts, lengths = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    assert (max_seqlen_q, max_seqlen_k) == (max(counts), max(lengths))
    outputs = []
    for query, length, table in zip(q.split(counts), lengths, block_table, strict=True):
        keys, values = (pages[table.long()].flatten(0, 1)[:length] for pages in (k, v))
        outputs.append(_attend(query, keys, values, causal, window_size, alibi_slopes))
    return torch.cat(outputs)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    block_table: Tensor,
    causal: bool,
    window_size: tuple[int, int],
    alibi_slopes: Tensor | None,
) -> Tensor:
    """Attend the last tokens of every sequence of a batch."""
    _check_integers(cache_seqlens, block_table)
    outputs = []
    for query, length, table in zip(q, cache_seqlens.tolist(), block_table, strict=True):
        keys, values = (pages[table.long()].flatten(0, 1)[:length] for pages in (k_cache, v_cache))
        outputs.append(_attend(query, keys, values, causal, window_size, alibi_slopes))
    return torch.stack(outputs)


def _check_integers(*tensors: Tensor) -> None:
    assert all(tensor.dtype == torch.int32 for tensor in tensors), "flash-attn takes 32-bit integers"


def _attend(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window_size: tuple[int, int], slopes: Tensor | None
) -> Tensor:
    assert q.stride(-1) == 1
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    distance = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))
    left, right = window_size
    hidden = torch.zeros(distance.shape, dtype=torch.bool)
    if causal:
        hidden |= distance < 0
    if left >= 0:
        hidden |= distance > left
    if right >= 0:
        hidden |= -distance > right
    scores = torch.einsum("qnh,knh->nqk", q, k) * q.shape[-1] ** -0.5
    if slopes is not None:
        assert slopes.dtype == torch.float32
        scores = scores - slopes[:, None, None] * distance.abs()
    return torch.einsum("nqk,knh->qnh", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
