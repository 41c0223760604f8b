"""Splits over all ranks cover a tensor once, and overlaps are correct."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_schema.errors import LayoutError
from mega_schema.sharding import (
    ReplicatedRange,
    Slab,
    Split,
    local_shape,
    overlap,
    overlaps,
    replicated_range,
    saved_boxes,
    slabs,
)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], Split | None, int]:
    """A shape, a way to cut it, and a number of ranks it can be cut over."""
    ranks = draw(st.integers(1, 6))
    shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
    kind = draw(st.sampled_from(("whole", "even", "blocks", "padded")))
    if kind == "whole":
        return tuple(shape), None, ranks
    dim = draw(st.integers(0, len(shape) - 1))
    if kind == "padded":
        shape[dim] = draw(st.integers(1, 40))
        return tuple(shape), Split("tp", dim, pad=draw(st.integers(1, 9))), ranks
    unit = draw(st.integers(1, 3))
    count = draw(st.integers(1, 4)) if kind == "blocks" else 1
    runs = [draw(st.integers(1, 3)) * ranks * unit for _ in range(count)]
    shape[dim] = sum(runs)
    return tuple(shape), Split("tp", dim, tuple(runs) if kind == "blocks" else (), unit=unit), ranks


@given(cuts())
def test_the_ranks_cover_every_element_once_unless_each_holds_all(
    cut: tuple[tuple[int, ...], Split | None, int],
) -> None:
    shape, split, ranks = cut
    covered = np.zeros(shape, int)
    for rank in range(ranks):
        for slab in slabs("w", shape, split, rank, ranks):
            assert not slab.is_empty
            covered[slab.in_global] += 1
    assert (covered == (1 if split else ranks)).all()


@given(cuts())
def test_the_places_of_a_ranks_boxes_are_apart_and_inside_its_share(
    cut: tuple[tuple[int, ...], Split | None, int],
) -> None:
    shape, split, ranks = cut
    share = local_shape("w", shape, split, ranks)
    for rank in range(ranks):
        counts = np.zeros(share, int)
        boxes = slabs("w", shape, split, rank, ranks)
        for slab in boxes:
            assert counts[slab.in_local].shape == slab.shape
            counts[slab.in_local] += 1
        assert counts.max(initial=0) <= 1
        if split is None or not split.pad:
            assert (counts == 1).all()


@given(cuts(), st.data())
def test_a_rank_holds_its_share_of_every_run_in_order(
    cut: tuple[tuple[int, ...], Split | None, int], data: st.DataObject
) -> None:
    shape, split, ranks = cut
    rank = data.draw(st.integers(0, ranks - 1))
    whole = np.arange(np.prod(shape)).reshape(shape)
    local = np.full(local_shape("w", shape, split, ranks), -1)
    for slab in slabs("w", shape, split, rank, ranks):
        local[slab.in_local] = whole[slab.in_global]
    if split is None:
        wanted = whole
    else:
        ends = np.cumsum(split.blocks)[:-1]
        runs = np.split(whole, ends, split.dim) if split.blocks else [whole]
        share = local.shape[split.dim]
        parts = [
            np.split(run, ranks, split.dim)[rank]
            if not split.pad
            else run.take(
                range(min(rank * share, run.shape[split.dim]), min((rank + 1) * share, run.shape[split.dim])),
                split.dim,
            )
            for run in runs
        ]
        wanted = np.concatenate(parts, split.dim)
        if split.pad:
            missing = [(0, share - wanted.shape[d] if d == split.dim else 0) for d in range(wanted.ndim)]
            wanted = np.pad(wanted, missing, constant_values=-1)
    assert np.array_equal(local, wanted)


BOX = st.tuples(st.integers(0, 6), st.integers(1, 5))


@given(st.lists(st.tuples(BOX, BOX), min_size=1, max_size=3))
def test_two_boxes_meet_where_both_have_elements(
    pairs: list[tuple[tuple[int, int], tuple[int, int]]],
) -> None:
    (a_start, a_shape), (b_start, b_shape) = (
        (tuple(box[side][0] for box in pairs), tuple(box[side][1] for box in pairs)) for side in (0, 1)
    )
    space = np.zeros([12] * len(pairs), int)
    space[Slab(a_start, a_shape, a_start).in_global] += 1
    space[Slab(b_start, b_shape, b_start).in_global] += 2
    met = overlap(a_start, a_shape, b_start, b_shape)
    assert (space == 3).sum() == (0 if met is None else np.prod(met.shape))
    if met is not None:
        assert (space[Slab(a_start, a_shape, a_start).in_global][met.a] == 3).all()
        assert (space[Slab(b_start, b_shape, b_start).in_global][met.b] == 3).all()


@given(cuts(), cuts())
def test_what_one_layout_holds_is_found_in_any_other(
    a: tuple[tuple[int, ...], Split | None, int], b: tuple[tuple[int, ...], Split | None, int]
) -> None:
    shape, split, ranks = a
    other_split = Split("tp", 0, pad=1) if b[1] else None
    whole = np.arange(np.prod(shape)).reshape(shape)
    have = [slab for rank in range(b[2]) for slab in slabs("w", shape, other_split, rank, b[2])]
    have = have if other_split else have[:1]
    for rank in range(ranks):
        for want in slabs("w", shape, split, rank, ranks):
            out = np.full(want.shape, -1)
            for number, met in overlaps(want, have):
                out[met.a] = whole[have[number].in_global][met.b]
            assert np.array_equal(out, whole[want.in_global])


def _any_cut(rng: random.Random) -> tuple[tuple[int, ...], Split | None, int]:
    """A shape and a cut as the tables have them: whole, even, in runs, padded, with repeated heads."""
    ranks, width, unit = rng.choice((1, 2, 3, 4, 6, 8, 12)), rng.randint(1, 3), rng.randint(1, 4)
    match rng.randrange(5):
        case 0:
            return (rng.randint(1, 9), width), None, ranks
        case 1:
            return (width, ranks * unit * rng.randint(1, 3)), Split("tp", 1, unit=unit), ranks
        case 2:
            run = ranks * rng.randint(1, 3)
            return (2 * run, width), Split("tp", 0, (run, run)), ranks
        case 3:
            return (rng.randint(1, 60), width), Split("tp", 0, pad=rng.randint(1, 9)), ranks
        case _:
            kv = rng.choice([n for n in range(1, 3 * ranks) if n % ranks == 0 or ranks % n == 0])
            q = math.lcm(kv, ranks) * rng.randint(1, 2)
            runs = (q * unit, kv * unit, kv * unit)
            shape = (sum(runs), width)[: rng.randint(1, 2)]
            return shape, Split("tp", 0, runs, unit=unit, repeats=(1, 2)), ranks


def test_over_thousands_of_cuts_every_element_is_held_and_answered_for_once() -> None:
    rng, repeats = random.Random(11), 0
    for _ in range(2500):
        shape, split, ranks = _any_cut(rng)
        holders, answered = np.zeros(shape, int), np.zeros(shape, int)
        ranges = replicated_range("w", shape, split, ranks)
        for rank in range(ranks):
            share = np.zeros(local_shape("w", shape, split, ranks), int)
            boxes, own = slabs("w", shape, split, rank, ranks), saved_boxes("w", shape, split, rank, ranks)
            assert set(own) <= set(boxes)
            for box in boxes:
                holders[box.in_global] += 1
                share[box.in_local] += 1
            for box in own:
                answered[box.in_global] += 1
                share[box.in_local] += 1
            assert share.max(initial=0) <= 2
            if split is not None and ranges is None:
                assert set(own) == set(boxes)
            if ranges is not None:
                twice = share.reshape(-1)[ranges.begin : ranges.end]
                assert (twice == (2 if rank % ranges.head_replicas == 0 else 1)).all()
                assert (np.delete(share.reshape(-1), np.s_[ranges.begin : ranges.end]) == 2).all()
                repeats += 1
        assert (answered == 1).all()
        assert (holders >= 1).all()
        if split is None:
            assert (holders == ranks).all()
        elif ranges is None:
            assert (holders == 1).all()
        else:
            assert set(np.unique(holders)) == {1, ranges.head_replicas}
    assert repeats > 250


def test_a_rank_holds_the_key_head_its_query_heads_read() -> None:
    """Eight query heads and two key heads over four ranks: heads 0 to 3 read key head 0, the others 1."""
    split = Split("tp", 0, (8, 2, 2), repeats=(1, 2))
    key_heads = [[box.start[0] for box in slabs("qkv", (12,), split, rank, 4)] for rank in range(4)]
    assert key_heads == [[0, 8, 10], [2, 8, 10], [4, 9, 11], [6, 9, 11]]
    assert [len(saved_boxes("qkv", (12,), split, rank, 4)) for rank in range(4)] == [3, 1, 3, 1]
    assert replicated_range("qkv", (12,), split, 4) == ReplicatedRange(2, 4, 2)
    assert replicated_range("qkv", (12,), split, 2) is None


@pytest.mark.parametrize(
    ("heads", "key_heads", "ranks", "message"),
    [
        (8, 2, 3, "8 heads cannot be split evenly over tp: found tp=3, wanted a divisor of 8; hint: .* 2$"),
        (12, 4, 6, "4 heads cannot be .*: found tp=6, wanted one of 1, 2, 4, 12; hint: .* 4$"),
        (4, 2, 8, "4 heads cannot be .*: found tp=8, wanted a divisor of 4; hint: .* 4$"),
    ],
)
def test_key_heads_that_neither_divide_nor_repeat_are_refused(
    heads: int, key_heads: int, ranks: int, message: str
) -> None:
    split = Split("tp", 0, (2 * heads, 2 * key_heads, 2 * key_heads), unit=2, repeats=(1, 2))
    with pytest.raises(LayoutError, match=message):
        slabs("qkv", (2 * heads + 4 * key_heads,), split, 0, ranks)


def test_padding_falls_on_the_last_ranks() -> None:
    split = Split("tp", 0, pad=4)
    assert local_shape("embed", (9, 2), split, 2) == (8, 2)
    assert [slab.shape for rank in range(4) for slab in slabs("embed", (9, 2), split, rank, 4)] == [
        (4, 2),
        (4, 2),
        (1, 2),
    ]
    assert slabs("embed", (9, 2), split, 3, 4) == ()


def test_heads_are_not_cut_in_two() -> None:
    with pytest.raises(LayoutError) as caught:
        slabs("qkv", (12, 4), Split("tp", 0, (4, 4, 4), unit=2), 0, 4)
    assert str(caught.value) == (
        "qkv: 2 heads cannot be split evenly over tp: found tp=4, wanted a divisor of 2; "
        "hint: --tensor-model-parallel-size 2"
    )


def test_the_degree_that_is_recommended_divides_the_key_heads_too() -> None:
    with pytest.raises(LayoutError, match="found tp=8, wanted a divisor of 2; hint: .* 2$"):
        local_shape("qkv", (24, 4), Split("tp", 0, (12, 6, 6), unit=3), 8)
    with pytest.raises(LayoutError, match="4 heads .* found tp=3, wanted a divisor of 2; hint: .* 2$"):
        local_shape("qkv", (24, 4), Split("tp", 0, (12, 6, 6), unit=3), 3)


def test_rows_that_do_not_divide_are_refused_with_a_degree_that_does() -> None:
    with pytest.raises(LayoutError, match="12 rows .* found tp=5, wanted a divisor of 12; hint: .* 4$"):
        local_shape("up", (12, 4), Split("tp", 0), 5)
