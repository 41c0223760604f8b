"""The tasks of a step of attention over pages."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mega_model.kernels.page_tiles import IntArray, tile_tasks

TILE_ROWS, SEQUENCE_ROWS = 8, 16


def _tasks(lengths: list[tuple[int, int]], kv_heads: int, group_size: int, threads: int = 1) -> IntArray:
    """Return the tasks of chunks of (tokens, tokens before them)."""
    chunk_C4 = np.array([(0, tokens, start, 0) for tokens, start in lengths], np.intp)
    return tile_tasks(
        chunk_C4,
        kv_heads,
        group_size,
        tile_rows=TILE_ROWS,
        sequence_rows=SEQUENCE_ROWS,
        threads=threads,
    )


@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 90)), min_size=1, max_size=6),
    kv_heads=st.integers(1, 9),
    group_size=st.integers(1, 20),
    threads=st.integers(1, 5),
)
def test_every_row_is_in_one_task_that_fits_its_scratch(
    lengths: list[tuple[int, int]], kv_heads: int, group_size: int, threads: int
) -> None:
    rows: Counter[tuple[int, int, int]] = Counter()
    for chunk, first_head, heads, tile in _tasks(lengths, kv_heads, group_size, threads).tolist():
        count = lengths[chunk][0] * group_size
        if heads:
            assert count < TILE_ROWS
            assert tile == 0
            assert heads * count <= SEQUENCE_ROWS
            places = [(head, i) for head in range(first_head, first_head + heads) for i in range(count)]
        else:
            last = min(count, (tile + 1) * TILE_ROWS)
            places = [(first_head, i) for i in range(tile * TILE_ROWS, last)]
            assert places
        rows.update((chunk, head, i) for head, i in places)
    expected = {
        (chunk, head, i)
        for chunk, (tokens, _) in enumerate(lengths)
        for head in range(kv_heads)
        for i in range(tokens * group_size)
    }
    assert rows == Counter(expected)


def test_the_longest_sequences_come_first() -> None:
    assert _tasks([(1, 3), (1, 80), (20, 0)], 1, 1)[:, 0].tolist() == [1, 2, 2, 2, 0]


def test_threads_share_the_heads_of_a_single_sequence() -> None:
    assert _tasks([(1, 50)], 12, 1).tolist() == [[0, 0, 12, 0]]
    assert _tasks([(1, 50)], 12, 1, threads=2).tolist() == [[0, 0, 6, 0], [0, 6, 6, 0]]
    assert _tasks([(1, 50)] * 4, 12, 1, threads=2)[:, 2].tolist() == [12] * 4
