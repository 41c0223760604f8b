"""Ranges of flattened tensors as boxes: every element once, for any shape and split."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from mega_schema.checkpoint.flat_ranges import fragments, range_boxes
from mega_schema.sharding import Shape, Slab, Split, local_shape, slabs


def _shape(rng: random.Random) -> Shape:
    return tuple(rng.randint(1, 6) for _ in range(rng.randint(1, 4)))


@pytest.mark.parametrize("seed", range(20))
def test_the_boxes_of_a_range_are_its_elements_in_order(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        shape = _shape(rng)
        numbers = np.arange(math.prod(shape)).reshape(shape)
        begin, end = sorted(rng.randint(0, numbers.size) for _ in range(2))
        elements = [
            numbers[Slab(start, extent, start).in_global].flatten()
            for start, extent in range_boxes(shape, begin, end)
        ]
        assert np.concatenate([*elements, []]).tolist() == list(range(begin, end)), (shape, begin, end)
        assert len(elements) <= max(1, 2 * len(shape) - 1), "no more boxes than are needed"


def test_whole_tensors_and_whole_rows_are_one_box_and_nothing_is_none() -> None:
    assert list(range_boxes((3, 4), 0, 12)) == [((0, 0), (3, 4))]
    assert list(range_boxes((3, 4), 4, 12)) == [((1, 0), (2, 4))]
    assert list(range_boxes((3, 4), 5, 7)) == [((1, 1), (1, 2))]
    assert list(range_boxes((3, 4), 2, 9)) == [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    assert list(range_boxes((3, 4), 5, 5)) == []


def _split(rng: random.Random, ranks: int) -> tuple[Shape, Split | None]:
    """A shape, and a cut of it over that many ranks: none, plain, in runs (Q|K|V), or with padding."""
    dims = rng.randint(1, 3)
    dim, shape = rng.randrange(dims), [rng.randint(1, 5) for _ in range(dims)]
    kind = rng.choice(("whole", "plain", "runs", "padded"))
    if kind == "whole":
        return tuple(shape), None
    runs = tuple(ranks * rng.randint(1, 3) for _ in range(3 if kind == "runs" else 1))
    shape[dim] = rng.randint(1, 9) if kind == "padded" else sum(runs)
    return tuple(shape), Split("tp", dim, runs if kind == "runs" else (), pad=2 if kind == "padded" else 0)


@pytest.mark.parametrize("seed", range(20))
def test_shares_of_shares_hold_every_element_of_a_tensor_once(seed: int) -> None:
    """Tensors are split over tp, flattened and split over replicas; unsplit tensors once on each rank."""
    rng = random.Random(seed)
    for _ in range(50):
        tp = rng.randint(1, 4)
        shape, split = _split(rng, tp)
        whole = np.arange(1, math.prod(shape) + 1).reshape(shape)
        seen = np.zeros_like(whole)
        for rank in range(tp):
            boxes = slabs("w", shape, split, rank, tp)
            local = np.zeros(local_shape("w", shape, split, tp), whole.dtype)
            for slab in boxes:
                local[slab.in_local] = whole[slab.in_global]
            cuts = sorted([0, local.size, *(rng.randint(0, local.size) for _ in range(rng.randint(0, 3)))])
            for begin, end in zip(cuts[:-1], cuts[1:], strict=True):
                shard = local.reshape(-1)[begin:end]
                for part in fragments(boxes, local.shape, begin, end):
                    values = shard[part.in_range].reshape(part.block)[part.slab.in_local]
                    np.testing.assert_array_equal(values, whole[part.slab.in_global])
                    seen[part.slab.in_global] += 1
        assert (seen == (tp if split is None else 1)).all(), (shape, split, tp)
