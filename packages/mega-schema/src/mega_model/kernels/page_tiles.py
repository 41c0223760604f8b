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
    heads = np.arange(kv_heads)[:, None]
    tasks = [np.stack(np.broadcast_arrays(c, heads, np.arange(tiles_C[c])), -1) for c in order]
    return np.concatenate([task.reshape(-1, 3) for task in tasks]).astype(np.intp)
