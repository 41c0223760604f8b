"""Attention over pages of keys and values on a CPU, compiled by numba: one call a layer, no gather.

Keys and values are stored in blocks of 16 positions. A block of keys is transposed: one vector holds one
component of 16 keys. A block of values has a row per position:

    keys    (pages, K, blocks of a page, H, 16)
    values  (pages, K, blocks of a page, 16, W)     W: H rounded up to a multiple of 16

A row is one query of one head. Its scores of all its keys are computed, then their softmax, then the sum of
the values, each in the order of positions. Its result is bitwise independent of the chunk, the tile and the
pages in which it is computed. The rows of one key head form tiles of 8, for which a block is read once.
Memory bounds a chunk with fewer rows per key head, as in a decode step: `_attend_sequence` reads its pages
in their order, all heads of a page together.

Legend: T tokens; N query heads, K key heads, G query heads per key head; H width of a head; C chunks.
"""

# mypy: ignore-errors
# numba finds the types of these functions when it compiles them

from __future__ import annotations

import numpy as np
from numba import njit, prange

from mega_model.kernels.numba.forms import build_forms
from mega_model.kernels.numba.simd import (
    LANES,
    build_tile_product,
    convert_like,
    exp_sum,
    prefetch,
    scale_row,
    vector_max,
)

TILE_ROWS = 8
SEQUENCE_ROWS = 16  # of the key heads that `_attend_sequence` computes together
_HEADS_AHEAD = 2  # the distance of prefetching, in key heads

_scores_of_tile = build_tile_product(TILE_ROWS, 1, accumulate=False)
_scores_of_row = build_tile_product(1, 1, accumulate=False)
_scores_of_row_4 = build_tile_product(1, 4, scattered=True, accumulate=False)
_values_of_tile = build_tile_product(TILE_ROWS, 1)
_values_of_tile_2 = build_tile_product(TILE_ROWS, 2)
_values_of_row = build_tile_product(1, 1)
_values_of_row_4 = build_tile_product(1, 4)


@njit(nogil=True, cache=True)
def _compute_scores(tile_q, keys, key_starts, values, value_starts, blocks, rows, scores):
    """Set scores[r, 16 b + j] to the product of row r and key j of block b, for `rows` rows.

    The values of those keys are fetched into the cache for `_add_values`.
    """
    width = tile_q.shape[1]
    step = scores.shape[1]
    if rows == TILE_ROWS:
        for b in range(blocks):
            _scores_of_tile(tile_q, 0, width, keys, key_starts[b], LANES, 0, width, scores, b * LANES, step)
        return
    for r in range(rows):
        b = 0
        while b + 4 <= blocks:
            place = r * step + b * LANES
            if r == 0:
                for ahead in range(b, b + 4):
                    prefetch(values, value_starts[ahead], LANES * width)
            _scores_of_row_4(tile_q, r * width, 0, keys, key_starts, LANES, b, width, scores, place, 0)
            b += 4
        while b < blocks:
            place = r * step + b * LANES
            _scores_of_row(tile_q, r * width, 0, keys, key_starts[b], LANES, 0, width, scores, place, 0)
            b += 1


@njit(nogil=True, cache=True)
def _add_row_values(scores, weights, values, start, block_keys, out, r):
    """Add to out[r] the values of a block from values[start], weighted by scores from scores[weights]."""
    width = out.shape[1]
    w = 0
    while w + 4 * LANES <= width:
        place = r * width + w
        _values_of_row_4(scores, weights, 0, values, start + w, width, LANES, block_keys, out, place, 0)
        w += 4 * LANES
    while w < width:
        place = r * width + w
        _values_of_row(scores, weights, 0, values, start + w, width, 0, block_keys, out, place, 0)
        w += LANES


@njit(nogil=True, cache=True)
def _add_values(scores, values, value_starts, count, keys, key_starts, next_head, rows, tile_out):
    """Add to tile_out[r] the first `count` values, weighted by scores[r], for `rows` rows.

    The keys of the next head, at a distance of `next_head`, are fetched into the cache for the next tile.
    """
    width = tile_out.shape[1]
    step = scores.shape[1]
    for first in range(0, count, LANES):
        start = value_starts[first // LANES]
        block_keys = min(LANES, count - first)
        if rows == TILE_ROWS:
            w = 0
            while w + 2 * LANES <= width:
                _values_of_tile_2(
                    scores, first, step, values, start + w, width, LANES, block_keys, tile_out, w, width
                )
                w += 2 * LANES
            if w < width:
                _values_of_tile(
                    scores, first, step, values, start + w, width, 0, block_keys, tile_out, w, width
                )
            continue
        prefetch(keys, key_starts[first // LANES] + next_head, LANES * width)
        for r in range(rows):
            _add_row_values(scores, r * step + first, values, start, block_keys, tile_out, r)


@njit(nogil=True, cache=True)
def _softmax_row(scores, r, first_key, blocks, position, window, slope):
    """Apply the mask to row r, replace its scores by their exponentials, and return 1 / their sum."""
    row = scores[r]
    keys = blocks * LANES
    if slope != 0.0:
        for j in range(keys):
            row[j] += slope * np.float32(first_key + j - position)
    for j in range(position + 1 - first_key, keys):
        row[j] = -np.inf
    if window > 0:
        for j in range(position + 1 - window - first_key):
            row[j] = -np.inf
    start = r * scores.shape[1]
    largest = vector_max(scores, start, blocks)
    return np.float32(1.0) / exp_sum(scores, start, blocks, largest)


@njit(nogil=True, cache=True)
def _row_start(array, token, head):
    """Return the distance of a token's head from the first element of an array, in elements."""
    return (token * array.strides[0] + head * array.strides[1]) // array.itemsize


@njit(nogil=True, cache=True)
def _find_blocks(keys, values, head, pages, first, blocks, key_starts, value_starts):
    """Set the first elements of a key head's blocks of keys and of values, from block `first` of a sequence.

    Args:
        pages: of the sequence, in its order; others may follow.
    """
    of_page = keys.shape[2]
    for b in range(blocks):
        page = pages[(first + b) // of_page]
        block = (page * keys.shape[1] + head) * of_page + (first + b) % of_page
        key_starts[b] = block * keys.shape[3] * LANES
        value_starts[b] = block * LANES * values.shape[4]


@njit(nogil=True, cache=True)
def attend_tile(q, keys, values, out, task, chunk_C4, pages, window, slopes, scale, scratch):
    """Compute attention of the rows of one tile."""
    tile_q, scores, tile_out, key_starts, value_starts = scratch
    chunk, key_head, tile = task
    first_token, count, start, table = chunk_C4[chunk]
    group = q.shape[1] // keys.shape[1]
    width = q.shape[2]
    blocks_of_page = keys.shape[2]
    begin = tile * TILE_ROWS
    rows = min(TILE_ROWS, count * group - begin)
    last = start + (begin + rows - 1) // group
    first_block = 0 if window == 0 else max(0, start + begin // group + 1 - window) // LANES
    blocks = last // LANES + 1 - first_block
    _find_blocks(keys, values, key_head, pages[table:], first_block, blocks, key_starts, value_starts)
    for r in range(rows):
        token, head = first_token + (begin + r) // group, key_head * group + (begin + r) % group
        scale_row(q, _row_start(q, token, head), tile_q, r * width, width, scale)
    _compute_scores(tile_q, keys, key_starts, values, value_starts, blocks, rows, scores)
    tile_out[:rows] = np.float32(0.0)
    first_key = first_block * LANES
    for r in range(rows):
        slope = slopes[key_head * group + (begin + r) % group]
        position = start + (begin + r) // group
        tile_q[r, 0] = _softmax_row(scores, r, first_key, blocks, position, window, slope)
    next_head = blocks_of_page * LANES * width
    count = last + 1 - first_key
    _add_values(scores, values, value_starts, count, keys, key_starts, next_head, rows, tile_out)
    for r in range(rows):
        token, head = first_token + (begin + r) // group, key_head * group + (begin + r) % group
        scale_row(tile_out, r * tile_out.shape[1], out, _row_start(out, token, head), width, tile_q[r, 0])


@njit(nogil=True, cache=True)
def _sequence_scores(q, keys, starts, blocks, head_step, heads, group, scores):
    """Set scores[r, 16 b + j] to the product of row r and key j of block b.

    Args:
        starts: of each block of the first key head, (blocks,); those of the next one are `head_step` further.
        heads: key heads, each with `group` rows.
    """
    width = q.shape[1]
    step = scores.shape[1]
    places = np.empty(4, np.intp)
    for first in range(0, blocks, 4):
        count = min(4, blocks - first)
        for head in range(heads):
            for i in range(count):
                places[i] = starts[first + i] + head * head_step
                # the pages of other sequences are between two blocks: the hardware does not foresee them
                if head + _HEADS_AHEAD < heads:
                    prefetch(keys, places[i] + _HEADS_AHEAD * head_step, LANES * width)
                elif first + 4 + i < blocks:
                    ahead = min(head + _HEADS_AHEAD - heads, heads - 1)
                    prefetch(keys, starts[first + 4 + i] + ahead * head_step, LANES * width)
            for r in range(head * group, (head + 1) * group):
                place = r * step + first * LANES
                if count == 4:
                    _scores_of_row_4(q, r * width, 0, keys, places, LANES, 0, width, scores, place, 0)
                else:
                    for i in range(count):
                        _scores_of_row(
                            q, r * width, 0, keys, places[i], LANES, 0, width, scores, place + i * LANES, 0
                        )


@njit(nogil=True, cache=True)
def _add_sequence_values(scores, values, starts, count, head_step, heads, group, out):
    """Add to out[r] the first `count` values, weighted by scores[r]; arguments as of `_sequence_scores`."""
    width = out.shape[1]
    step = scores.shape[1]
    for first in range(0, count, LANES):
        block = first // LANES
        block_keys = min(LANES, count - first)
        for head in range(heads):
            start = starts[block] + head * head_step
            if head + _HEADS_AHEAD < heads:
                prefetch(values, start + _HEADS_AHEAD * head_step, LANES * width)
            elif first + LANES < count:
                ahead = min(head + _HEADS_AHEAD - heads, heads - 1)
                prefetch(values, starts[block + 1] + ahead * head_step, LANES * width)
            for r in range(head * group, (head + 1) * group):
                _add_row_values(scores, r * step + first, values, start, block_keys, out, r)


@njit(nogil=True, cache=True)
def _attend_sequence(q, keys, values, out, task, chunk_C4, pages, window, slopes, scale, scratch):
    """Compute attention of a chunk's few rows, of the task's key heads together."""
    rows_q, scores, rows_out, key_starts, value_starts = scratch
    chunk, first_head, heads, _ = task
    first_token, tokens, start, table = chunk_C4[chunk]
    group = q.shape[1] // keys.shape[1]
    width = q.shape[2]
    blocks_of_page = keys.shape[2]
    rows = tokens * group
    last = start + tokens - 1
    first_block = 0 if window == 0 else max(0, start + 1 - window) // LANES
    blocks = last // LANES + 1 - first_block
    _find_blocks(keys, values, first_head, pages[table:], first_block, blocks, key_starts, value_starts)
    for head in range(heads):
        for i in range(rows):
            token, query_head = first_token + i // group, (first_head + head) * group + i % group
            place = (head * rows + i) * width
            scale_row(q, _row_start(q, token, query_head), rows_q, place, width, scale)
    head_step = blocks_of_page * LANES * width
    _sequence_scores(rows_q, keys, key_starts, blocks, head_step, heads, rows, scores)
    rows_out[: heads * rows] = np.float32(0.0)
    first_key = first_block * LANES
    for head in range(heads):
        for i in range(rows):
            r = head * rows + i
            slope = slopes[(first_head + head) * group + i % group]
            rows_q[r, 0] = _softmax_row(scores, r, first_key, blocks, start + i // group, window, slope)
    head_step = blocks_of_page * LANES * rows_out.shape[1]
    _add_sequence_values(scores, values, value_starts, last + 1 - first_key, head_step, heads, rows, rows_out)
    for head in range(heads):
        for i in range(rows):
            token, query_head = first_token + i // group, (first_head + head) * group + i % group
            r = head * rows + i
            place = _row_start(out, token, query_head)
            scale_row(rows_out, r * rows_out.shape[1], out, place, width, rows_q[r, 0])


def _attend(
    q, k, v, keys, values, out, tasks, chunk_C4, pages, slot_T, longest, window, slopes, scale, threads
):
    """Write the new keys and values to their pages, then compute attention of all chunks.

    Args:
        q, k, v, out: (T, N, H), (T, K, H), (T, K, H), (T, N, H); bfloat16 as uint16. The H numbers of a head
            lie side by side.
        keys, values: the layer's pages, float32 or bfloat16 as uint16; written.
        tasks: (tasks, 4), see `page_tiles.tile_tasks`.
        chunk_C4: of each chunk the first token, the number of tokens, the position of the first, and the
            index of its block table in `pages`.
        slot_T: page · page size + offset in it, of each token.
        longest: keys of the longest sequence.
        window: keys that a token sees; 0: all before it.
        slopes: (N,) float32, 0 without ALiBi.
        threads: workers; task i is computed by worker i mod threads.
    """
    assert q.strides[2] == q.itemsize
    assert out.strides[2] == out.itemsize
    page_size = keys.shape[2] * LANES
    tokens, key_heads, width = k.shape
    for worker in prange(threads):
        for t in range(worker, tokens, threads):
            page, offset = slot_T[t] // page_size, slot_T[t] % page_size
            block, lane = offset // LANES, offset % LANES
            for head in range(key_heads):
                for h in range(width):
                    keys[page, head, block, h, lane] = convert_like(keys, k[t, head, h])
                    values[page, head, block, lane, h] = convert_like(values, v[t, head, h])
    for worker in prange(threads):
        blocks = longest // LANES + 1
        scratch = (
            np.empty((SEQUENCE_ROWS, width), np.float32),
            np.empty((SEQUENCE_ROWS, blocks * LANES), np.float32),
            np.empty((SEQUENCE_ROWS, values.shape[4]), np.float32),
            np.empty(blocks, np.intp),
            np.empty(blocks, np.intp),
        )
        for i in range(worker, len(tasks), threads):
            task = tasks[i]
            if task[2]:
                _attend_sequence(q, keys, values, out, task, chunk_C4, pages, window, slopes, scale, scratch)
            else:
                place = (task[0], task[1], task[3])
                attend_tile(q, keys, values, out, place, chunk_C4, pages, window, slopes, scale, scratch)


attend_serial, attend_parallel = build_forms(_attend)
