"""A tensor laid out as one row of numbers, and the boxes that a stretch of that row is.

What is cut over replicas (ZeRO, arXiv:1910.02054) is cut in equal stretches of flat buffers, which begin and
end in the middle of a tensor's rows. A checkpoint knows boxes only: a stretch is a ragged first row, whole
rows and a ragged last row, and so on inwards for tensors of more dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mega_schema.sharding import Shape, Slab, overlap


@dataclass(frozen=True, slots=True)
class FlatFragment:
    """A box of a global tensor and where its values lie in a stretch of a flattened local one.

    Attributes:
        slab: the box; `slab.in_local` is its place in the block.
        offset: first element of the block in the stretch.
        block: shape of the block, whose elements lie end to end in the stretch.
    """

    slab: Slab
    offset: int
    block: Shape

    @property
    def in_range(self) -> slice:
        """Where the block's elements lie."""
        return slice(self.offset, self.offset + math.prod(self.block))


def range_boxes(shape: Shape, begin: int, end: int) -> Iterator[tuple[Shape, Shape]]:
    """The boxes, as start and extent, that elements `begin` up to `end` of a flattened tensor are.

    They come in the order of the elements, and there are at most two for every dimension.
    """
    if begin >= end:
        return
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row  # whole rows
    if first > last:  # all within one row
        row_index = begin // row
        yield from _within(row_index, shape, begin - row_index * row, end - row_index * row)
        return
    if begin < first * row:
        yield from _within(first - 1, shape, begin - (first - 1) * row, row)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if last * row < end:
        yield from _within(last, shape, 0, end - last * row)


def fragments(slabs: Sequence[Slab], shape: Shape, begin: int, end: int) -> Iterator[FlatFragment]:
    """What elements `begin` up to `end` of a flattened local tensor hold of the global one.

    Args:
        slabs: the boxes of the global tensor that lie in the local one; padding is in none of them.
        shape: of the local tensor.
    """
    offset = 0
    for start, extent in range_boxes(shape, begin, end):
        for slab in slabs:
            shared = overlap(slab.local_start, slab.shape, start, extent)
            if shared is not None:
                global_start = tuple(s + i for s, i in zip(slab.start, shared.in_a, strict=True))
                yield FlatFragment(Slab(global_start, shared.shape, shared.in_b), offset, extent)
        offset += math.prod(extent)


def _within(row: int, shape: Shape, begin: int, end: int) -> Iterator[tuple[Shape, Shape]]:
    for start, extent in range_boxes(shape[1:], begin, end):
        yield (row, *start), (1, *extent)
