"""The tasks into which `kernels.numba.page_attention` cuts a step, as integers without torch."""

from __future__ import annotations

from typing import Any

import numpy as np

IntArray = np.ndarray[Any, np.dtype[np.intp]]


def tile_tasks(
    chunk_C4: IntArray,
    kv_heads: int,
    group_size: int,
    *,
    tile_rows: int,
    sequence_rows: int,
    threads: int = 1,
) -> IntArray:
    """Return the tasks of a step, (tasks, 4), those of the longest sequences first.

    A chunk with a full tile of rows per key head has a task for each of its tiles: chunk, key head, 0, number
    of the tile. Any other has tasks for a few key heads together: chunk, first key head, key heads, 0.

    Args:
        chunk_C4: see `page_attention._attend`.
        group_size: query heads per key head.
        tile_rows: rows of a tile, each one query of one head.
        sequence_rows: rows of the key heads of a task, at most, where it has more than one.
        threads: that share the tasks.
    """
    rows_C = chunk_C4[:, 1] * group_size
    order = np.argsort(-(chunk_C4[:, 1] + chunk_C4[:, 2]), kind="stable")
    rows_c = rows_C[order]
    is_tiled_c = rows_c >= tile_rows
    share = kv_heads if len(order) >= 2 * threads else -(-kv_heads // threads)
    heads_c = np.where(is_tiled_c, 1, np.clip(sequence_rows // rows_c, 1, share))
    tiles_c = np.where(is_tiled_c, -(-rows_c // tile_rows), 1)
    tasks_c = -(-kv_heads // heads_c) * tiles_c
    number = np.arange(tasks_c.sum()) - np.repeat(np.cumsum(tasks_c) - tasks_c, tasks_c)  # in its chunk
    task, tile = np.divmod(number, np.repeat(tiles_c, tasks_c))
    most = np.repeat(heads_c, tasks_c)
    first = task * most
    heads = np.where(np.repeat(is_tiled_c, tasks_c), 0, np.minimum(most, kv_heads - first))
    return np.stack([np.repeat(order, tasks_c), first, heads, tile], -1).astype(np.intp)
