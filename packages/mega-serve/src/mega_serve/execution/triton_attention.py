"""Triton kernels that write keys and values to pages, and attend over pages in place.

One kernel serves prompts and generation. A program computes a tile of rows, (token, query head), that share a
key head, over a part of their keys (arXiv:2205.14135); a second kernel merges the parts, as flash-decoding
does. Scores, softmax and sums are float32.

Legend: T tokens; N query heads, K key heads; H width of a head; S keys of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE_ROWS = 64
_MIN_ROWS = 16  # of a product on tensor cores
_MAX_KEYS = 64
_KEY_TILE_BYTES = 16 * 1024  # of a block of keys in shared memory, where two blocks of keys and values are
_MAX_SPLITS = 64
_PROGRAMS_PER_PROCESSOR = 2
_STORE_BLOCK = 1024


@triton.jit
def _store_kernel(
    k, v, keys, values, slots, stride_k, stride_v,
    ELEMENTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = element < ELEMENTS
    target = tl.load(slots + token) * ELEMENTS + element
    key = tl.load(k + token * stride_k + element, inside)
    value = tl.load(v + token * stride_v + element, inside)
    tl.store(keys + target, key.to(keys.dtype.element_ty), inside)
    tl.store(values + target, value.to(values.dtype.element_ty), inside)


@triton.jit
def _attend_kernel(
    q, keys, values, out, part, logsum, slopes, tile_token, tile_count, tile_start, tile_table, tables,
    table_width, stride_q, tokens, scale,
    N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    HAS_SLOPES: tl.constexpr, SPLITS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group: tl.constexpr = N // K
    first_token = tl.load(tile_token + tile).to(tl.int64)
    count = tl.load(tile_count + tile)
    start = tl.load(tile_start + tile).to(tl.int32)
    table = tables + tl.load(tile_table + tile).to(tl.int64) * table_width
    row = tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    token = first_token + row // group
    head = kv_head * group + row % group
    is_row = row < count * group
    is_column = column < H
    is_value = is_row[:, None] & is_column[None, :]
    position = start + row // group
    query = tl.load(q + token[:, None] * stride_q + head[:, None] * H + column[None, :], is_value, 0.0)
    query = query.to(keys.dtype.element_ty)
    if HAS_SLOPES:
        slope = tl.load(slopes + head, is_row, 0.0)

    # this program's part of the keys that any row of the tile sees
    end = start + count
    first = tl.maximum(0, start + 1 - WINDOW) if WINDOW > 0 else 0
    share = tl.cdiv(tl.cdiv(end - first, SPLITS), KEYS) * KEYS
    low = first + split * share
    high = tl.minimum(low + share, end)

    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    for base in range(low, high, KEYS):
        key = base + tl.arange(0, KEYS)
        is_key = key < high
        slot = tl.load(table + key // PAGE, is_key, 0).to(tl.int64) * PAGE + key % PAGE
        offset = (slot[:, None] * K + kv_head) * H + column[None, :]
        is_stored = is_key[:, None] & is_column[None, :]
        key_block = tl.load(keys + offset, is_stored, 0.0)
        scores = tl.dot(query, tl.trans(key_block), input_precision="ieee") * scale
        distance = position[:, None] - key[None, :]
        visible = (distance >= 0) & is_key[None, :]
        if WINDOW > 0:
            visible = visible & (distance < WINDOW)
        if HAS_SLOPES:
            scores -= slope[:, None] * distance.to(tl.float32)
        scores = tl.where(visible, scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)  # a row without keys yet
        weights = tl.exp(scores - shift[:, None])
        decay = tl.exp(largest - shift)
        value_block = tl.load(values + offset, is_stored, 0.0)
        total = total * decay + tl.sum(weights, 1)
        sums = sums * decay[:, None]
        sums += tl.dot(weights.to(value_block.dtype), value_block, input_precision="ieee")
        largest = new_largest

    total = tl.where(total == 0.0, 1.0, total)  # no keys in this part, or a row of padding
    result = sums / total[:, None]
    if SPLITS == 1:
        target = (token[:, None] * N + head[:, None]) * H + column[None, :]
        tl.store(out + target, result.to(out.dtype.element_ty), is_value)
    else:
        place = (split * tokens + token) * N + head
        tl.store(part + place[:, None] * H + column[None, :], result, is_value)
        tl.store(logsum + place, largest + tl.log(total), is_row)  # -inf if there are no keys


@triton.jit
def _merge_kernel(
    part, logsum, out, tokens,
    N: tl.constexpr, H: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < H
    place = (tl.arange(0, SPLITS) * tokens + token) * N + head
    sums = tl.load(logsum + place)
    weights = tl.exp(sums - tl.max(sums, 0))
    parts = tl.load(part + place[:, None] * H + column[None, :], inside[None, :], 0.0)
    result = tl.sum(parts * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out + (token * N + head) * H + column, result.to(out.dtype.element_ty), inside)


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiles of a step: consecutive tokens of one chunk. All tensors are integers on the device.

    Attributes:
        token: of each tile the first token on the axis of tokens.
        count: tokens of each tile.
        start: position of the first token in its sequence.
        table: row of the sequence in `tables`.
        tables: (rows, width): the pages of each sequence in order, padded on the right.
        tile_tokens: the most tokens of a tile.
    """

    token: Tensor
    count: Tensor
    start: Tensor
    table: Tensor
    tables: Tensor
    tile_tokens: int


def store_pages(k_TKH: Tensor, v_TKH: Tensor, keys: Tensor, values: Tensor, slot_T: Tensor) -> None:
    """Write keys and values of tokens to their slots in a layer's pages, (pages, page size, K, H)."""
    k, v = _with_whole_rows(k_TKH), _with_whole_rows(v_TKH)
    elements = k.shape[1] * k.shape[2]
    block = min(_STORE_BLOCK, triton.next_power_of_2(elements))
    _store_kernel[len(k), triton.cdiv(elements, block)](
        k, v, keys, values, slot_T, k.stride(0), v.stride(0), elements, block
    )


def attend_pages(
    q_TNH: Tensor,
    keys: Tensor,
    values: Tensor,
    tiles: Tiles,
    *,
    window: int | None,
    slope_N: Tensor | None,
    processors: int,
) -> Tensor:
    """Compute softmax(q kᵀ / √H) v over the pages of one layer, (T, N, H) in the dtype of the queries.

    Args:
        keys, values: (pages, page size, K, H), which hold the keys of the step's tokens too.
        window, slope_N: see `attention_mask.AttentionMask`.
        processors: multiprocessors of the device, which decide into how many parts the keys are split.
    """
    q = _with_whole_rows(q_TNH)
    tokens, heads, width = q.shape
    _, page_size, kv_heads, _ = keys.shape
    block = max(_MIN_ROWS, triton.next_power_of_2(width))
    rows = max(_MIN_ROWS, triton.next_power_of_2(tiles.tile_tokens * (heads // kv_heads)))
    splits = split_count(len(tiles.token) * kv_heads, processors)
    out_TNH = torch.empty((tokens, heads, width), dtype=q.dtype, device=q.device)
    part = torch.empty((splits, tokens, heads, width), device=q.device) if splits > 1 else out_TNH
    logsum = torch.empty((splits, tokens, heads), device=q.device) if splits > 1 else out_TNH
    _attend_kernel[len(tiles.token), kv_heads, splits](
        q, keys, values, out_TNH, part, logsum, out_TNH if slope_N is None else slope_N,
        tiles.token, tiles.count, tiles.start, tiles.table, tiles.tables, tiles.tables.stride(0),
        q.stride(0), tokens, width**-0.5,
        N=heads, K=kv_heads, H=width, PAGE=page_size, WINDOW=window or 0, HAS_SLOPES=slope_N is not None,
        SPLITS=splits, ROWS=rows, KEYS=_block_keys(block, keys.element_size()), BLOCK=block,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    if splits > 1:
        _merge_kernel[tokens, heads](
            part, logsum, out_TNH, tokens, N=heads, H=width, SPLITS=splits, BLOCK=block
        )
    return out_TNH


def tile_tokens(longest_chunk: int, group_size: int) -> int:
    """Return the tokens of a tile, for chunks of up to `longest_chunk` tokens."""
    return min(longest_chunk, max(1, _TILE_ROWS // group_size))


def split_count(programs: int, processors: int) -> int:
    """Return into how many parts keys are split, a power of two, so that all processors have work."""
    wanted = max(1, _PROGRAMS_PER_PROCESSOR * processors // programs)
    return min(_MAX_SPLITS, 1 << (wanted.bit_length() - 1))


def _block_keys(block_width: int, element_bytes: int) -> int:
    return max(_MIN_ROWS, min(_MAX_KEYS, _KEY_TILE_BYTES // (block_width * element_bytes)))


def _with_whole_rows(x_TNH: Tensor) -> Tensor:
    """Return the tensor with the heads of a token side by side; tokens may be further apart."""
    return x_TNH if x_TNH.stride()[1:] == (x_TNH.shape[2], 1) else x_TNH.contiguous()
