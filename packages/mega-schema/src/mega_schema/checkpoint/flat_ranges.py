"""Ranges of a flattened tensor, and the boxes that they are made of.

Tensors are sharded over replicas (ZeRO, arXiv:1910.02054) in equal ranges of flat buffers, which begin and
end within a row. A checkpoint has only boxes: a range is a partial first row, whole rows and a partial last
row, and so on recursively for tensors of more dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mega_schema.sharding import Shape, Slab, overlap


@dataclass(frozen=True, slots=True)
class FlatFragment:
    """A box of a global tensor, and where its values are in a range of a flattened local tensor.

    Attributes:
        slab: the box; `slab.in_local` is its place in the block.
        offset: first element of the block in the range.
        block: shape of the block, whose elements are contiguous in the range.
    """

    slab: Slab
    offset: int
    block: Shape

    @property
    def in_range(self) -> slice:
        """The block's elements, as a slice of the range."""
        return slice(self.offset, self.offset + math.prod(self.block))


def range_boxes(shape: Shape, begin: int, end: int) -> Iterator[tuple[Shape, Shape]]:
    """Yield the boxes, as start and extent, that elements `begin` to `end` of a flattened tensor consist of.

    In the order of the elements; at most two for every dimension. Recursive: a partial row is a range of a
    tensor with one dimension less.
    """
    if begin >= end:
        return
    row = math.prod(shape[1:])
    # whole rows
    first = -(-begin // row)
    last = end // row
    if first > last:  # all within one row
        row_index = begin // row
        yield from _row_boxes(row_index, shape, begin - row_index * row, end - row_index * row)
        return
    if begin < first * row:
        yield from _row_boxes(first - 1, shape, begin - (first - 1) * row, row)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if last * row < end:
        yield from _row_boxes(last, shape, 0, end - last * row)


def fragments(slabs: Sequence[Slab], shape: Shape, begin: int, end: int) -> Iterator[FlatFragment]:
    """Yield the parts of the global tensor in elements `begin` to `end` of a flattened local tensor.

    Args:
        slabs: the boxes of the global tensor in the local one; none of them contains padding.
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


def _row_boxes(row: int, shape: Shape, begin: int, end: int) -> Iterator[tuple[Shape, Shape]]:
    for start, extent in range_boxes(shape[1:], begin, end):
        yield (row, *start), (1, *extent)
