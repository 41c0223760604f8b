"""Boxes and runs of foreign tensors that several ranks wrote."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from mega_ckpt.name_maps.alias import ForeignTensor, consecutive_runs
from mega_schema.sharding import Shape, Slab, overlap


def select_box(whole: ForeignTensor, start: Shape, shape: Shape) -> ForeignTensor:
    """Select a box of a foreign tensor as a foreign tensor; it has no boxes if it is all padding.

    Args:
        whole: the whole foreign tensor, not transposed.
        start, shape: the box, in the stored arrangement.
    """
    assert not whole.transpose, f"{whole.name}: transposed"
    if whole.order is None:
        overlaps = [(box, overlap(start, shape, box.local_start, box.shape)) for box in whole.boxes]
        boxes = [Slab(_add(box.start, m.in_b), m.shape, m.in_a) for box, m in overlaps if m is not None]
        return replace(whole, shape=shape, boxes=tuple(boxes))
    order = np.asarray(whole.order)
    (ours,) = np.nonzero((order >= start[0]) & (order < start[0] + shape[0]))
    boxes = []
    for first, position, count in consecutive_runs(ours):
        for box in whole.boxes:
            m = overlap((first, *start[1:]), (count, *shape[1:]), box.local_start, box.shape)
            if m is not None:
                offset = _add((position, *(0,) * (len(shape) - 1)), m.in_a)
                boxes.append(Slab(_add(box.start, m.in_b), m.shape, offset))
    return replace(whole, shape=shape, boxes=tuple(boxes), order=tuple((order[ours] - start[0]).tolist()))


def run_to_boxes(shape: Shape, begin: int, end: int) -> Iterator[tuple[Shape, Shape]]:
    """Split numbers `begin` up to `end` of a tensor in C order into boxes: start and shape, in order."""
    if begin >= end:
        return
    if len(shape) == 1:
        yield (begin,), (end - begin,)
        return
    row = math.prod(shape[1:])
    # whole rows of the range
    first = -(-begin // row)
    last = end // row
    if first > last:  # a part of one row
        yield from _boxes_in_row(shape, last, begin, end)
        return
    yield from _boxes_in_row(shape, first - 1, begin, first * row)
    if first < last:
        yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])
    yield from _boxes_in_row(shape, last, last * row, end)


def _boxes_in_row(shape: Shape, number: int, begin: int, end: int) -> Iterator[tuple[Shape, Shape]]:
    before = number * math.prod(shape[1:])
    for start, extent in run_to_boxes(shape[1:], begin - before, end - before):
        yield (number, *start), (1, *extent)


def _add(a: Shape, b: Shape) -> Shape:
    return tuple(m + n for m, n in zip(a, b, strict=True))
