"""The tree of segments: every tp adds the same numbers in the same order."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_schema.errors import LayoutError
from mega_schema.row_segments import MAX_SEGMENTS, check_segments, count_local_segments, count_segments
from mega_schema.spec import gpt


def _tree(leaves: list[str]) -> str:
    """Write the additions of neighbours, level by level."""
    while len(leaves) > 1:
        leaves = [f"({a}+{b})" for a, b in zip(leaves[::2], leaves[1::2], strict=True)]
    return leaves[0]


@given(width=st.integers(1, 20_000))
def test_segments_are_a_power_of_two_of_equal_even_widths(width: int) -> None:
    segments = count_segments(width)
    assert segments & (segments - 1) == 0
    assert segments <= MAX_SEGMENTS
    assert width % segments == 0
    assert segments == 1 or width // segments % 2 == 0


@given(segment_width=st.integers(1, 100).map(lambda half: 2 * half), tp=st.sampled_from([1, 2, 4, 8]))
def test_every_tp_adds_in_one_tree(segment_width: int, tp: int) -> None:
    width = MAX_SEGMENTS * segment_width
    local = count_local_segments(width // tp, tp)
    assert local * tp == count_segments(width)
    leaves = [str(leaf) for leaf in range(local * tp)]
    parts = [_tree(leaves[rank * local : (rank + 1) * local]) for rank in range(tp)]
    assert _tree(parts) == _tree(leaves)


def test_a_tp_that_cuts_a_segment_is_refused() -> None:
    spec = replace(gpt(layers=1, hidden=96, heads=6, vocab=32, max_seq_len=8), ffn=96)
    for tp in (1, 2):
        check_segments(spec, tp)
    with pytest.raises(LayoutError) as caught:
        check_segments(spec, 3)
    assert str(caught.value) == (
        "--batch-invariant: sums 96 inputs in 8 segments, which tp does not divide: found tp 3, wanted "
        "1 | 2 | 4 | 8"
    )
