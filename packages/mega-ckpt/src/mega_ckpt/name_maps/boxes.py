"""Boxes of foreign tensors that several ranks wrote in parts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mega_ckpt.name_maps.alias import ForeignTensor, consecutive_ranges
from mega_schema.sharding import Shape, Slab, overlap


def select_box(whole: ForeignTensor, start: Shape, shape: Shape) -> ForeignTensor:
    """Select a box of a foreign tensor as a foreign tensor; it has no boxes if it is all padding.

    Args:
        whole: one that is not transposed.
        start, shape: of the box, as the tensor is there.
    """
    assert not whole.transpose, f"{whole.name}: transposed"
    if whole.order is None:
        overlaps = [(box, overlap(start, shape, box.local_start, box.shape)) for box in whole.boxes]
        boxes = [Slab(_add(box.start, m.in_b), m.shape, m.in_a) for box, m in overlaps if m is not None]
        return replace(whole, shape=shape, boxes=tuple(boxes))
    order = np.asarray(whole.order)
    (ours,) = np.nonzero((order >= start[0]) & (order < start[0] + shape[0]))
    boxes = []
    for first, position, count in consecutive_ranges(ours):
        for box in whole.boxes:
            m = overlap((first, *start[1:]), (count, *shape[1:]), box.local_start, box.shape)
            if m is not None:
                place = _add((position, *(0,) * (len(shape) - 1)), m.in_a)
                boxes.append(Slab(_add(box.start, m.in_b), m.shape, place))
    return replace(whole, shape=shape, boxes=tuple(boxes), order=tuple((order[ours] - start[0]).tolist()))


def _add(a: Shape, b: Shape) -> Shape:
    return tuple(m + n for m, n in zip(a, b, strict=True))
