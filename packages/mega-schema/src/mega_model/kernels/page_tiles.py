"""The tiles into which `kernels.numba.page_attention` cuts a step, as integers without torch."""

from __future__ import annotations

from typing import Any

import numpy as np

IntArray = np.ndarray[Any, np.dtype[np.intp]]


def tile_tasks(chunk_C4: IntArray, kv_heads: int, group_size: int, tile_rows: int) -> IntArray:
    """Return (tiles, 3): chunk, key head and number of every tile of rows; the longest sequences first.

    Args:
        chunk_C4: see `page_attention._attend`.
        group_size: query heads per key head.
        tile_rows: rows of a tile, each one query of one head.
    """
    tiles_C = -(-chunk_C4[:, 1] * group_size // tile_rows)
    order = np.argsort(-(chunk_C4[:, 1] + chunk_C4[:, 2]), kind="stable")
    tiles_c = tiles_C[order]
    tasks_c = tiles_c * kv_heads
    number = np.arange(tasks_c.sum()) - np.repeat(np.cumsum(tasks_c) - tasks_c, tasks_c)  # in its chunk
    head, tile = np.divmod(number, np.repeat(tiles_c, tasks_c))
    return np.stack([np.repeat(order, tasks_c), head, tile], -1).astype(np.intp)
