"""Tensors of which a foreign file has parts: the boxes that a program's ranks wrote, and runs of numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from mega_ckpt.name_maps.alias import Foreign, runs
from mega_schema.shard import Shape, Slab, overlap


def part_of(whole: Foreign, start: Shape, shape: Shape) -> Foreign:
    """A box of a foreign tensor, as a foreign tensor; it fills none of ours where it is padding alone.

    Args:
        whole: one that is not transposed.
        start, shape: of the box, as the tensor is there.
    """
    assert not whole.transpose, f"{whole.name}: transposed"
    if whole.order is None:
        met = [(box, overlap(start, shape, box.at, box.shape)) for box in whole.boxes]
        boxes = [Slab(_plus(box.start, m.in_b), m.shape, m.in_a) for box, m in met if m is not None]
        return replace(whole, shape=shape, boxes=tuple(boxes))
    order = np.asarray(whole.order)
    (ours,) = np.nonzero((order >= start[0]) & (order < start[0] + shape[0]))
    boxes = []
    for first, at, count in runs(ours):
        for box in whole.boxes:
            m = overlap((first, *start[1:]), (count, *shape[1:]), box.at, box.shape)
            if m is not None:
                place = _plus((at, *(0,) * (len(shape) - 1)), m.in_a)
                boxes.append(Slab(_plus(box.start, m.in_b), m.shape, place))
    return replace(whole, shape=shape, boxes=tuple(boxes), order=tuple((order[ours] - start[0]).tolist()))


def boxes_of_run(shape: Shape, begin: int, end: int) -> Iterator[tuple[Shape, Shape]]:
    """Numbers `begin` up to `end` of a tensor in C order, as boxes of it: start and shape, in their order."""
    if begin >= end:
        return
    if len(shape) == 1:
        yield (begin,), (end - begin,)
        return
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row  # rows that are in it whole
    if first > last:  # a part of one row
        yield from _of_row(shape, last, begin, end)
        return
    yield from _of_row(shape, first - 1, begin, first * row)
    if first < last:
        yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])
    yield from _of_row(shape, last, last * row, end)


def _of_row(shape: Shape, number: int, begin: int, end: int) -> Iterator[tuple[Shape, Shape]]:
    before = number * math.prod(shape[1:])
    for start, extent in boxes_of_run(shape[1:], begin - before, end - before):
        yield (number, *start), (1, *extent)


def _plus(a: Shape, b: Shape) -> Shape:
    return tuple(m + n for m, n in zip(a, b, strict=True))
