"""Boxes and runs of foreign tensors map to the right boxes of a parameter."""

from __future__ import annotations

import numpy as np
import pytest

from mega_ckpt.name_maps.alias import ForeignTensor
from mega_ckpt.name_maps.boxes import select_box
from mega_schema.sharding import Slab


@pytest.mark.parametrize("seed", range(30))
def test_boxes_of_a_foreign_tensor_together_are_ours(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, columns, padding = (int(n) for n in rng.integers(1, 9, 3))
    order = tuple(rng.permutation(rows).tolist()) if seed % 2 else None
    padding = 0 if order else padding
    theirs = rng.normal(size=(rows + padding, columns))
    ours = theirs[:rows] if order is None else theirs[list(order)]
    whole = ForeignTensor("x", "ours", theirs.shape, (Slab((0, 0), ours.shape, (0, 0)),), order=order)
    copy, times = np.zeros_like(ours), np.zeros(ours.shape, int)
    cuts = [sorted({0, n, *rng.integers(0, n, 2).tolist()}) for n in theirs.shape]
    for top, bottom in zip(cuts[0], cuts[0][1:], strict=False):
        for left, right in zip(cuts[1], cuts[1][1:], strict=False):
            part = select_box(whole, (top, left), (bottom - top, right - left))
            for box in part.boxes:
                copy[box.in_global] = part.select(theirs[top:bottom, left:right], box.in_local)
                times[box.in_global] += 1
    assert (times == 1).all()
    assert np.array_equal(copy, ours)
